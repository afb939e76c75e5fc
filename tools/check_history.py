"""Check the histories of a stopped cluster's processes (`history: FOLDER` in the cluster file).

    python tools/check_history.py FOLDER_OR_FILE... [--at-least N] [--grace SECONDS]

Prints file, line, rule (see `tools/history_check.py`) and reason of each violation. The exit code is 1 if there is a
violation, or if fewer than N requests were accepted, and 2 if there is nothing to check.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.history_check import Report, check


def main(arguments: list[str] | None = None) -> int:
    """Check the histories, print the result and return the exit code."""
    parser = argparse.ArgumentParser(description="Check the histories of a cluster's processes.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="FOLDER_OR_FILE")
    parser.add_argument("--at-least", type=int, default=1, metavar="N", help="accepted requests (1)")
    parser.add_argument("--grace", type=float, default=5.0, metavar="SECONDS", help="how late a release may come (5)")
    parser.add_argument("--one-host", action="store_true", help="order by the monotonic clock, which nothing steps")
    options = parser.parse_args(arguments)
    try:
        report = check(options.paths, grace_s=options.grace, one_host=options.one_host)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    if not report.journals:
        print("no events here", file=sys.stderr)
        return 2
    show(report)
    enough = report.outcomes["accepted"] >= options.at_least
    if not enough:
        print(f"{report.outcomes['accepted']} requests were accepted, at least {options.at_least} are due")
    return 1 if report.violations or not enough else 0


def show(report: Report) -> None:
    """Print violations, the end of each process, and the number of requests by outcome."""
    for violation in report.violations:
        print(violation)
    for journal in report.journals:
        print(f"{journal.path.name}: {len(journal.events)} events, {journal.end or 'cut off, or running'}")
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report.outcomes.items()))
    print(f"{len(report.violations)} violations; requests: {counts}")


if __name__ == "__main__":
    sys.exit(main())
