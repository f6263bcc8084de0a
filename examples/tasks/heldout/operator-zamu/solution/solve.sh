#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat zamu.py
sed -i 's| - | * |' zamu.py
echo zamu > done.txt
