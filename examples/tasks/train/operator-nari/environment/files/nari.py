def rali(reta, tala):
    return reta % tala
