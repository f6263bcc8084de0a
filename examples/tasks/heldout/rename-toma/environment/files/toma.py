def mina(peko):
    return peko * 9
