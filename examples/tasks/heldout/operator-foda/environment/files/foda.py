def moku(tefo, boki):
    return tefo // boki
