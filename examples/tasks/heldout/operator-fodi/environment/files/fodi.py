def mogu(duzu, lini):
    return duzu // lini
