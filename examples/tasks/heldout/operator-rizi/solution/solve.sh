#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat rizi.py
sed -i 's| // | * |' rizi.py
echo rizi > done.txt
