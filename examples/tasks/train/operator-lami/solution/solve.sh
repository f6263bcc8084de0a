#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat lami.py
sed -i 's| + | - |' lami.py
echo lami > done.txt
