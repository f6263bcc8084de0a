def nigi(foba, nira):
    return foba % nira
