#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat libu.cfg
echo razu = 1 >> libu.cfg
echo libu > done.txt
