def megu(zola, gozi):
    return zola + gozi
