def febi(zegi, demi):
    return zegi // demi
