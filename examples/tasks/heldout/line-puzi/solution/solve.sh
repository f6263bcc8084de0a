#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat puzi.cfg
echo rizi = 9 >> puzi.cfg
echo puzi > done.txt
