#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat pegi.py
sed -i 's| + | % |' pegi.py
echo pegi > done.txt
