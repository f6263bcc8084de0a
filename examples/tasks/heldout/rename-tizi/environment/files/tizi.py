def babi(zibi):
    return zibi * 7
