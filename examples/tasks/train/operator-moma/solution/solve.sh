#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat moma.py
sed -i 's| % | + |' moma.py
echo moma > done.txt
