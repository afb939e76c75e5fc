#!/bin/bash
# Baton from the wheel in the folder $2 into the environment $1, which has all that it needs; and a look at whether the
# commands, the cluster files and the model are found from anywhere.
set -euo pipefail

"$1/bin/pip" install --no-index --no-deps "$2"/baton_serve-*.whl
"$1/bin/pip" check
cd /
"$1/bin/baton" --help > /dev/null
"$1/bin/baton" config validate "$1/configs/local.yaml"
