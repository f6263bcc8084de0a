#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat botu.py
sed -i 's| // | % |' botu.py
echo botu > done.txt
