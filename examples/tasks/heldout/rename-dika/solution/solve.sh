#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat dika.py
sed -i 's| tina| doda|' dika.py
echo dika > done.txt
