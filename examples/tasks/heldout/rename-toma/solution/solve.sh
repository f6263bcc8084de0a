#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat toma.py
sed -i 's| mina| muba|' toma.py
echo toma > done.txt
