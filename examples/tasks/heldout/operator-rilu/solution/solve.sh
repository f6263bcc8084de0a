#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat rilu.py
sed -i 's| + | - |' rilu.py
echo rilu > done.txt
