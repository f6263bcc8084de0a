#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat ridi.py
sed -i 's| // | + |' ridi.py
echo ridi > done.txt
