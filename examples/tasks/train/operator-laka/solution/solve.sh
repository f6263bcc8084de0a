#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat laka.py
sed -i 's| + | - |' laka.py
echo laka > done.txt
