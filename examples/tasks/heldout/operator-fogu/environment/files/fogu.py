def fiba(ziti, dazu):
    return ziti + dazu
