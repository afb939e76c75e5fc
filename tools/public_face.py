"""The public face of Baton, one line per fact: `tests/guards/public_face.txt`. A guard test compares it.

    python -m tools.public_face             # write it, after an intended change
    python -m tools.public_face --check     # exit code 1 if the committed file is stale

`make fmt` does not write it, because every change of the face must be intended.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from tools.face import commands, names, schemas, seen, wire

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "guards" / "public_face.txt"
COMMAND = "python -m tools.public_face"
HEAD = f"# The public face of Baton. Do not edit. To change it on purpose: {COMMAND}\n"
SECTIONS: dict[str, Callable[[], Iterable[str]]] = {
    "names": names.names,
    "commands": commands.commands,
    "config": schemas.config,
    "metrics": seen.metrics,
    "logs": seen.logs,
    "proto": wire.proto,
    "http": schemas.routes,
    "environment": seen.variables,
    "errors": names.errors,
}


def collected(section: str) -> list[str]:
    """Return the facts of the code, sorted."""
    return sorted(set(SECTIONS[section]()))


def recorded(path: Path = FILE) -> dict[str, list[str]]:
    """Return the facts of the file, by section."""
    found: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("[") and line.endswith("]"):
            found[line[1:-1]] = facts = []
        elif line and not line.startswith("#"):
            facts.append(line)
    return found


def text() -> str:
    """Return the text of the file."""
    return HEAD + "".join(f"\n[{name}]\n" + "".join(f"{fact}\n" for fact in collected(name)) for name in SECTIONS)


def changes(section: str, before: Iterable[str], now: Iterable[str]) -> str:
    """Return removed and added lines and the command that accepts them, or an empty text."""
    removed, added = sorted({*before} - {*now}), sorted({*now} - {*before})
    if not removed and not added:
        return ""
    lines = [f"  - {line}" for line in removed] + [f"  + {line}" for line in added]
    title = f"the public face changed, section {section}: {len(removed)} removed, {len(added)} added"
    return "\n".join((title, *lines, f"if this is on purpose: {COMMAND}"))


def main() -> int:
    """Write or check the file and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    if not parser.parse_args().check:
        FILE.write_text(text(), encoding="utf-8")
        return 0
    known = recorded()
    found = [changes(name, known.get(name, ()), collected(name)) for name in SECTIONS]
    print(*filter(None, found), sep="\n\n", end="\n" if any(found) else "", file=sys.stderr)
    return 1 if any(found) else 0


if __name__ == "__main__":
    sys.exit(main())
