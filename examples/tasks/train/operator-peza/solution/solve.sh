#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat peza.py
sed -i 's| % | // |' peza.py
echo peza > done.txt
