def babi(zibi, tizi):
    return zibi - tizi
