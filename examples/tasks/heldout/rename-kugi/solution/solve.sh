#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat kugi.py
sed -i 's| fego| bapi|' kugi.py
echo kugi > done.txt
