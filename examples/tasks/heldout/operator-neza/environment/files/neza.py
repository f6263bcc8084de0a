def lado(fabo, daku):
    return fabo - daku
