def zaba(fuko):
    return fuko * 2
