"""Explore the states of one handoff, then find each planted bug. See docs/design/handoff.md.

    python -m tools.handoff_states                            12 events, 2 faults, all planted bugs
    python -m tools.handoff_states --events 4 --seconds 60    a smaller part

The last line of stdout is one JSON object. The exit code is 1 after a violation, or if a planted bug is not found.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict

from tools.handoff_states.bugs import BUGS, Bug
from tools.handoff_states.explore import Found, search_here, search_shared
from tools.handoff_states.states import replaced

BUG_EVENTS, BUG_FAULTS, BUG_SECONDS = 6, 1, 300.0


def found_by(bug: Bug) -> str:
    """Return the violation that finds a planted bug, or an empty string."""
    with replaced(), bug.planted():
        return search_here(BUG_EVENTS, BUG_FAULTS, BUG_SECONDS).violation


def _show(found: Found, seconds: float) -> None:
    print(f"{found.states:,} states, {found.transitions:,} transitions in {seconds:.0f} s", flush=True)
    if found.violation:
        print(f"{found.violation}\n  after: {', '.join(found.path)}")


def main() -> int:
    """Run the search and the planted bugs. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=12, help="most events after an undisturbed state")
    parser.add_argument("--faults", type=int, default=2, help="most faults")
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit of the search")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    began = time.monotonic()
    found = search_shared(options.events, options.faults, options.seconds, options.jobs)
    seconds = round(time.monotonic() - began, 1)
    _show(found, seconds)
    bugs = {bug.name: found_by(bug) for bug in BUGS}
    for name, violation in bugs.items():
        print(f"{name}: {violation or 'NOT FOUND'}")
    hits = sum(map(bool, bugs.values()))
    print(json.dumps({**asdict(found), "seconds": seconds, "bugs_found": hits, "bugs": len(bugs)}))
    return 1 if found.violation or hits < len(bugs) else 0


if __name__ == "__main__":
    sys.exit(main())
