#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat dazu.py
sed -i 's| // | % |' dazu.py
echo dazu > done.txt
