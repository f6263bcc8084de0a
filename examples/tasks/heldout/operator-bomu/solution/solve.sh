#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat bomu.py
sed -i 's| // | * |' bomu.py
echo bomu > done.txt
