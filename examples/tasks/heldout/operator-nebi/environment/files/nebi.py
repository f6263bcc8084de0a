def fipu(boza, lebu):
    return boza - lebu
