#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat tizi.py
sed -i 's| babi| lefi|' tizi.py
echo tizi > done.txt
