"""Options of programs that measure several kinds of one model in turns, in one process."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def turns_parser(doc: str | None, page: str) -> argparse.ArgumentParser:
    """Return the options. `page` is the one of docs/measurements/ that --write-docs changes."""
    home = Path(os.environ.get("BATON_HOME") or Path.home() / ".baton").expanduser()
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--quick", action="store_true", help="two rounds, and a model of at most 125 M")
    found.add_argument("--tiny", action="store_true", help="a toy model: to try the program, not to measure")
    found.add_argument("--rounds", type=int, help="turns of all kinds (5)")
    found.add_argument("--threads", type=int, default=1)
    found.add_argument("--cache", type=Path, default=home / "bench", help="folder for models")
    found.add_argument("--write-docs", action="store_true", help=f"put the table into docs/measurements/{page}.md")
    return found


def number_of_turns(options: argparse.Namespace) -> int:
    """Return the number of turns."""
    return options.rounds or (2 if options.quick or options.tiny else 5)
