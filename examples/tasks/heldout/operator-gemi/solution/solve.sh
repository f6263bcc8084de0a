#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat gemi.py
sed -i 's| - | + |' gemi.py
echo gemi > done.txt
