#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat pata.py
sed -i 's| // | % |' pata.py
echo pata > done.txt
