def nuro(rozu, begi):
    return rozu // begi
