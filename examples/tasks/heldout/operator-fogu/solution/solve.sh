#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat fogu.py
sed -i 's| + | // |' fogu.py
echo fogu > done.txt
