#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat rifo.py
sed -i 's| + | // |' rifo.py
echo rifo > done.txt
