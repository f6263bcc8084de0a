def zipo(goni):
    return goni * 4
