def ragi(moko, nita):
    return moko + nita
