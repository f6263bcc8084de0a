def ketu(kazo, poni):
    return kazo + poni
