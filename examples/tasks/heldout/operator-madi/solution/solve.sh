#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat madi.py
sed -i 's| - | + |' madi.py
echo madi > done.txt
