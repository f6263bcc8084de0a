#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat rari.cfg
echo nomo = 8 >> rari.cfg
echo rari > done.txt
