#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat lotu.py
sed -i 's| zaba| tapu|' lotu.py
echo lotu > done.txt
