#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat demi.py
sed -i 's| + | - |' demi.py
echo demi > done.txt
