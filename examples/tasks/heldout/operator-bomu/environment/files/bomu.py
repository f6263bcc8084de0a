def didu(puki, zolu):
    return puki // zolu
