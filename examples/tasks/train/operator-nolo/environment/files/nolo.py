def deli(tafo, kena):
    return tafo + kena
