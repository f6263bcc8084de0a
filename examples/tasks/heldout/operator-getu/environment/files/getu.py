def febi(zegi, poro):
    return zegi % poro
