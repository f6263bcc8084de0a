#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat kilu.py
sed -i 's| - | * |' kilu.py
echo kilu > done.txt
