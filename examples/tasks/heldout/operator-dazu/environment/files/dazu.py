def nebi(boza, lebu):
    return boza // lebu
