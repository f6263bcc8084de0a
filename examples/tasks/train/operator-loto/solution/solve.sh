#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat loto.py
sed -i 's| // | * |' loto.py
echo loto > done.txt
