#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat loda.py
sed -i 's| - | // |' loda.py
echo loda > done.txt
