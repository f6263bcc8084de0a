#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat namo.py
sed -i 's| % | - |' namo.py
echo namo > done.txt
