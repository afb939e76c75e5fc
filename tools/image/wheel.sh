#!/bin/bash
# Build Baton's wheel in the folder $1 with the versions in constraints.txt.
set -euo pipefail

scratch=$(mktemp -d)
python3 -m venv "$scratch"
"$scratch/bin/pip" install -c constraints.txt hatchling
"$scratch/bin/pip" wheel --no-deps --no-build-isolation --wheel-dir "$1" .
rm -r "$scratch"
