def medi(bogi, momi):
    return bogi + momi
