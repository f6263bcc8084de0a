#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat ledo.py
sed -i 's| + | - |' ledo.py
echo ledo > done.txt
