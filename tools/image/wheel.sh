#!/bin/bash
# Build Baton's wheel in the folder $1 with the versions in constraints.txt: the one of `make wheel`, with compiled kernels
# and the demo model. BATON_WHEEL_KERNELS names other levels of kernels than all. The hook that compiles them imports the
# other packages.
set -euo pipefail

scratch=$(mktemp -d)
python3 -m venv "$scratch"
"$scratch/bin/pip" install -c constraints.txt hatchling structlog blake3 xxhash
export BATON_WHEEL_KERNELS=${BATON_WHEEL_KERNELS:-all}
"$scratch/bin/pip" wheel --no-deps --no-build-isolation --wheel-dir "$1" .
rm -r "$scratch"
