def bomu(didu, moku):
    return didu % moku
