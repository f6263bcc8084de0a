def bago(gumi, fega):
    return gumi + fega
