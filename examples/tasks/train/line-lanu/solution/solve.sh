#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat lanu.cfg
echo pepo = 2 >> lanu.cfg
echo lanu > done.txt
