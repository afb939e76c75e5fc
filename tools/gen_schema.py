"""Write the JSON Schema of the cluster file, for editors: `configs/schema.json`, as `baton config schema` prints it.

    python -m tools.gen_schema             # write it (`make fmt` does)
    python -m tools.gen_schema --check     # is the committed file the one that the code gives?

The cluster files name it in their first line, as yaml-language-server wants it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from baton.cli.config import schema_text

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = ROOT / "configs" / "schema.json"


def is_stale(path: Path = SCHEMA) -> bool:
    """The file is not there, or not what the code gives now."""
    return not path.exists() or path.read_text() != schema_text() + "\n"


def main() -> int:
    """Parse the command line and do what it asks."""
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
