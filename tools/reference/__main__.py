"""Writes or checks the generated parts of docs/reference."""

from __future__ import annotations

import argparse
import sys

import tools.reference as package
from tools.reference import caps, commands, events, failures, families, keys
from tools.reference.pages import Page


def pages() -> list[Page]:
    """Return all pages with generated parts."""
    return [
        commands.page(),
        keys.config_page(),
        keys.http_page(),
        failures.page(),
        caps.page(),
        events.page(),
        families.page(),
    ]


def stale() -> list[Page]:
    """Return the pages that are not up to date."""
    return [page for page in pages() if page.filled(page.path.read_text()) != page.path.read_text()]


def main(argv: list[str]) -> int:
    """Write or check the pages and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.reference",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args(argv).check
    for page in stale():
        if check:
            print(f"{page.path} is stale, run: make fmt", file=sys.stderr)
            return 1
        page.path.write_text(page.filled(page.path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
