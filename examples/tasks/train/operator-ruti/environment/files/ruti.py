def laku(fezi, guga):
    return fezi + guga
