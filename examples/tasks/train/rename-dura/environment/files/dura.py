def buna(nopo):
    return nopo * 3
