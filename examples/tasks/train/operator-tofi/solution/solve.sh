#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat tofi.py
sed -i 's| + | - |' tofi.py
echo tofi > done.txt
