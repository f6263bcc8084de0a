def miga(bubo, dala):
    return bubo % dala
