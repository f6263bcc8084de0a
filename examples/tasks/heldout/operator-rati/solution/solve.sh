#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat rati.py
sed -i 's| - | // |' rati.py
echo rati > done.txt
