#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat doma.py
sed -i 's| // | - |' doma.py
echo doma > done.txt
