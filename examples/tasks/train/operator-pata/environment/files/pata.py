def pagi(nezi, nifi):
    return nezi // nifi
