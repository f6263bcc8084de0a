def befo(diti, fulo):
    return diti - fulo
