#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat zoba.py
sed -i 's| // | + |' zoba.py
echo zoba > done.txt
