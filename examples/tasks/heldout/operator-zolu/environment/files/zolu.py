def fogu(fiba, ziti):
    return fiba + ziti
