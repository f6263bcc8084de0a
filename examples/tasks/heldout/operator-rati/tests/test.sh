#!/bin/bash
# -I: nothing in the work folder can stand in for a module of the checker.
python3 -I "${POLAR_TESTS:-/tests}/check.py"
