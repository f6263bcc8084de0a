def faku(legi, kifu):
    return legi - kifu
