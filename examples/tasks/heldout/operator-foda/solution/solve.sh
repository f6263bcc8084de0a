#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat foda.py
sed -i 's| // | * |' foda.py
echo foda > done.txt
