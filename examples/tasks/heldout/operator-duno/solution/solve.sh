#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat duno.py
sed -i 's| // | * |' duno.py
echo duno > done.txt
