#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat fuki.py
sed -i 's| // | + |' fuki.py
echo fuki > done.txt
