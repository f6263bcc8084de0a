def tazi(tebu, neko):
    return tebu + neko
