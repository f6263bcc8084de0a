#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat dagu.py
sed -i 's| - | % |' dagu.py
echo dagu > done.txt
