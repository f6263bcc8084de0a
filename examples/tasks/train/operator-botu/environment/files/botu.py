def gogu(duku, mima):
    return duku // mima
