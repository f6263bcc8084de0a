def rafu(lefu, gema):
    return lefu // gema
