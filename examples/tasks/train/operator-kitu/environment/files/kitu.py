def gira(zolo, pola):
    return zolo - pola
