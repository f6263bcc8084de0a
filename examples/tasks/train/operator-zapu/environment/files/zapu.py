def beri(gefa, bado):
    return gefa - bado
