def kuzu(foku, bodo):
    return foku - bodo
