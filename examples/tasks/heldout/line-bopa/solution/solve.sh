#!/bin/bash
set -e
cd "${POLAR_WORKDIR:-/app}"
cat bopa.cfg
echo pifa = 2 >> bopa.cfg
echo bopa > done.txt
