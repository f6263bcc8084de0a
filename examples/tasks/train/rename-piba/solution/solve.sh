#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat piba.py
sed -i 's| zipo| foru|' piba.py
echo piba > done.txt
