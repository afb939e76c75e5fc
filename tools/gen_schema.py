"""Generates the JSON Schema of the cluster file for editors, `configs/schema.json`, as in `baton config schema`.

    python -m tools.gen_schema             # write it (`make fmt` does)
    python -m tools.gen_schema --check     # exit code 1 if the committed file is stale

The first line of a cluster file refers to it, in the syntax of yaml-language-server.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from baton.cli.setup.config import schema_text

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = ROOT / "configs" / "schema.json"


def is_stale(path: Path = SCHEMA) -> bool:
    """Return whether the file is missing or outdated."""
    return not path.exists() or path.read_text() != schema_text() + "\n"


def main() -> int:
    """Write or check the schema and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    if not parser.parse_args().check:
        SCHEMA.write_text(schema_text() + "\n")
        return 0
    if is_stale():
        print(f"{SCHEMA.relative_to(ROOT)} is stale, run: make fmt", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
