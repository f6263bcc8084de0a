#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat debu.py
sed -i 's| // | % |' debu.py
echo debu > done.txt
