#!/bin/bash
# Create a virtual environment in the folder $1 with the dependencies of the image, without Baton itself.
# TORCH_INDEX: an extra package index with another build of torch, such as the CPU build.
set -euo pipefail

python3 -m venv "$1"
requirements=$(mktemp)
"$1/bin/python" - > "$requirements" << 'PYTHON'
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], sep="\n")
for name in ("server", "gateway", "local", "otel", "kubernetes", "gguf", "transformers"):
    print(*extras[name], sep="\n")
PYTHON
"$1/bin/pip" install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c constraints.txt -r "$requirements"
"$1/bin/pip" check
rm "$requirements"
