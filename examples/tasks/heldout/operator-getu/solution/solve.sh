#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat getu.py
sed -i 's| // | + |' getu.py
echo getu > done.txt
