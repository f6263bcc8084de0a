def muti(gemu, goga):
    return gemu - goga
