#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat ruti.py
sed -i 's| + | // |' ruti.py
echo ruti > done.txt
