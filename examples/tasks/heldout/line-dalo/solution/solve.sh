#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat dalo.cfg
echo kilu = 7 >> dalo.cfg
echo dalo > done.txt
