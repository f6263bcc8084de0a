#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat zapu.py
sed -i 's| - | % |' zapu.py
echo zapu > done.txt
