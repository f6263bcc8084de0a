def nuzu(dulo, pimi):
    return dulo + pimi
