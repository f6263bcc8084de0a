#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat gunu.py
sed -i 's| + | % |' gunu.py
echo gunu > done.txt
