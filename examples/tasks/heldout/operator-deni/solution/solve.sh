#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat deni.py
sed -i 's| % | // |' deni.py
echo deni > done.txt
