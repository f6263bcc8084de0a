#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat fodi.py
sed -i 's| // | + |' fodi.py
echo fodi > done.txt
