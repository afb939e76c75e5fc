"""`--sample`: `make check` and `make test` run a drawn share of large matrices, `make chaos` runs all cases.

`@pytest.mark.sample(3)` on a parametrized test keeps three of its cases. `@pytest.mark.sample(1, of="a name")` keeps
one of all tests with that name. Compiled kernels run at the best level of the processor and at a drawn one, because
the kernels of a level compile for 15 s. In CI the commit decides the draw: a run can be repeated, and the next commit
runs other cases.

`python -m tests.support.sampling FILE ...` prints the text that decides the draw, and in a second line a drawn half.
"""

import os
import random
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from baton.engine.kernels.cpu.compiler import LEVELS, machine

VARIABLE = "BATON_TEST_SAMPLE"


def drawn_by(seed: int) -> str:
    """Return the text that decides the draw: the variable, in CI the commit, otherwise the run's seed. Sets the
    variable, which xdist's workers inherit.
    """
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = (_commit() if os.environ.get("CI") else "") or str(seed)
    return os.environ[VARIABLE]


def _commit() -> str:
    command = ["git", "rev-parse", "HEAD"]
    try:
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        return ""


def left_out(items: Sequence[pytest.Item], drawn: str) -> list[pytest.Item]:
    """Return the cases of sampled tests and of levels that were not drawn, in their order."""
    others = other_levels(drawn)
    left = {item for item in items if level_of(item) in others}
    matrices = defaultdict[str, list[pytest.Item]](list)
    counts: dict[str, int] = {}
    for item in items:
        if item in left:
            continue
        if mark := item.get_closest_marker("sample"):
            name = mark.kwargs.get("of") or item.nodeid.partition("[")[0]
            matrices[name].append(item)
            counts[name] = mark.args[0]
    for name, cases in matrices.items():
        left |= set(random.Random(f"{drawn} {name}").sample(cases, max(0, len(cases) - counts[name])))
    return [item for item in items if item in left]


def half(files: Sequence[str], drawn: str) -> list[str]:
    """Return a drawn half of test files and folders, rounded up."""
    return sorted(random.Random(f"{drawn} half").sample(sorted(files), (len(files) + 1) // 2))


def level_of(item: pytest.Item) -> str | None:
    """Return the level of instructions that a case sets, if any."""
    return item.callspec.params.get("level") if hasattr(item, "callspec") else None


@cache
def other_levels(drawn: str) -> set[str]:
    """Return all levels but the best one of this processor and a drawn one, or none if it has no level."""
    best, *others = [level for level, needed in LEVELS.items() if machine().flags.issuperset(needed)] or [""]
    kept = {best, *random.Random(f"{drawn} level").sample(others, min(1, len(others)))}
    return set(LEVELS) - kept if best else set()


if __name__ == "__main__":
    from tests.conftest import run_seed

    drawn = drawn_by(run_seed())
    print(f"half: {drawn} (repeat with {VARIABLE}={shlex.quote(drawn)} make without-kernels HALF=1)", file=sys.stderr)
    print(drawn, " ".join(half(sys.argv[1:], drawn)), sep="\n")
