#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat fiki.py
sed -i 's| + | - |' fiki.py
echo fiki > done.txt
