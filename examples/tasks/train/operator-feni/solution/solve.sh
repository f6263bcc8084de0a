#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat feni.py
sed -i 's| - | * |' feni.py
echo feni > done.txt
