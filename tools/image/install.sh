#!/bin/bash
# Install the wheel in the folder $2 into the environment $1, which has the dependencies. Then check that the commands,
# the cluster files and the model are found from any folder.
set -euo pipefail

"$1/bin/pip" install --no-index --no-deps "$2"/baton_serve-*.whl
"$1/bin/pip" check
cd /
"$1/bin/baton" --help > /dev/null
"$1/bin/baton" config validate "$1/configs/local.yaml"
