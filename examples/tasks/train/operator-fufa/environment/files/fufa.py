def doti(galo, pono):
    return galo % pono
