def lodu(kafa, zuro):
    return kafa // zuro
