def boda(muzu, rafi):
    return muzu // rafi
