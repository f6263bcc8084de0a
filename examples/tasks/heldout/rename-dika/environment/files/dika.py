def tina(rufu):
    return rufu * 3
