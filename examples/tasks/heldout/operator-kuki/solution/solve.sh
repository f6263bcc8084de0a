#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat kuki.py
sed -i 's| + | - |' kuki.py
echo kuki > done.txt
