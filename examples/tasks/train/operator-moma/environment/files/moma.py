def munu(teli, poku):
    return teli % poku
