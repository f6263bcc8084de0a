def diri(beni, gana):
    return beni - gana
