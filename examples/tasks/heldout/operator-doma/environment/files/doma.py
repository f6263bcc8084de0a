def furo(gegu, gufa):
    return gegu // gufa
