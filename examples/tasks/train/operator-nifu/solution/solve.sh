#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat nifu.py
sed -i 's| % | + |' nifu.py
echo nifu > done.txt
