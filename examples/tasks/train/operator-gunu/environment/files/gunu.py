def giro(zili, tigi):
    return zili + tigi
