def ginu(kulo, zeti):
    return kulo - zeti
