#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat muba.py
sed -i 's| - | + |' muba.py
echo muba > done.txt
