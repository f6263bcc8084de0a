def keti(kuma, kozo):
    return kuma + kozo
