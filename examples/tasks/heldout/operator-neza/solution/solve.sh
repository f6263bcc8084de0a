#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat neza.py
sed -i 's| - | // |' neza.py
echo neza > done.txt
