def ledo(megu, zola):
    return megu + zola
