#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat dura.py
sed -i 's| buna| kepo|' dura.py
echo dura > done.txt
