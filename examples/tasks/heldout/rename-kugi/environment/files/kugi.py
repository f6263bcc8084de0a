def fego(zubo):
    return zubo * 2
