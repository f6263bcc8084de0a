#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat ronu.py
sed -i 's| // | % |' ronu.py
echo ronu > done.txt
