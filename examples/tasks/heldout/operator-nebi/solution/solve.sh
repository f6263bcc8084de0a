#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat nebi.py
sed -i 's| - | % |' nebi.py
echo nebi > done.txt
