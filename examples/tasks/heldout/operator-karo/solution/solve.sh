#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat karo.py
sed -i 's| + | * |' karo.py
echo karo > done.txt
