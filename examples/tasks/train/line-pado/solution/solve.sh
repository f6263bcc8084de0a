#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat pado.cfg
echo laru = 6 >> pado.cfg
echo pado > done.txt
