#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat nera.py
sed -i 's| - | // |' nera.py
echo nera > done.txt
