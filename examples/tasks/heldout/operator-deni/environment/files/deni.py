def bopa(taru, pifa):
    return taru % pifa
