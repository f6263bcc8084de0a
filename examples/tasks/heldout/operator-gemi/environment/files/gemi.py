def zigi(ruko, toru):
    return ruko - toru
