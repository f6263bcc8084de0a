#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat lonu.py
sed -i 's| % | * |' lonu.py
echo lonu > done.txt
