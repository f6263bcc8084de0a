#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat kitu.py
sed -i 's| - | * |' kitu.py
echo kitu > done.txt
