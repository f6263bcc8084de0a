def tetu(gagi, nora):
    return gagi % nora
