#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat lepo.py
sed -i 's| - | % |' lepo.py
echo lepo > done.txt
