def gino(tipi, ziri):
    return tipi - ziri
