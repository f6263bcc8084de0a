def komo(tufa, foto):
    return tufa + foto
