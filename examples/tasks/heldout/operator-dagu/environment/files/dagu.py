def beku(bigu, gigo):
    return bigu - gigo
