#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat lefi.py
sed -i 's| - | + |' lefi.py
echo lefi > done.txt
