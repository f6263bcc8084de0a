def lubu(zika, rula):
    return zika // rula
