#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat dalo.py
sed -i 's| % | - |' dalo.py
echo dalo > done.txt
