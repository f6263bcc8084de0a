def tigu(nazo, puzi):
    return nazo // puzi
