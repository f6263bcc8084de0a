#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat fufa.py
sed -i 's| % | - |' fufa.py
echo fufa > done.txt
