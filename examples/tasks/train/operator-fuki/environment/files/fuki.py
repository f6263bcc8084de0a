def mili(gadi, feza):
    return gadi // feza
