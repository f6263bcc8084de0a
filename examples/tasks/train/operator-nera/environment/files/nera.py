def gonu(nala, nuti):
    return nala - nuti
