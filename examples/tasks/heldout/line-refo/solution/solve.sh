#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat refo.cfg
echo ramo = 7 >> refo.cfg
echo refo > done.txt
