def mina(peko, toma):
    return peko - toma
