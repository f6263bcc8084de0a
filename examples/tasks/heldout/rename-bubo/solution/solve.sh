#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat bubo.py
sed -i 's| miga| dala|' bubo.py
echo bubo > done.txt
