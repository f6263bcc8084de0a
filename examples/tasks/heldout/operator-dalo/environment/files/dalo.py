def lonu(tuga, zepa):
    return tuga % zepa
