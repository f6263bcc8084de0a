def miga(namo):
    return namo * 7
