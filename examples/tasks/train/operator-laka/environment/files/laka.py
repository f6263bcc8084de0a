def dupa(memu, zuru):
    return memu + zuru
