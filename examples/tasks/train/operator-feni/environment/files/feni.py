def guta(guro, fedo):
    return guro - fedo
