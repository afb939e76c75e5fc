"""Change the product in small ways, one at a time, and count the changes that a test notices:

    .venv/bin/python -m tools.mutants OUT.jsonl [--count 1500] [--seed 1] [--jobs 2] [--budget 8]
    .venv/bin/python -m tools.mutants AFTER.jsonl --again BEFORE.jsonl

A mutant is killed if a test that executes its lines fails or hangs. The nearest and quickest tests run first, within
`--budget` seconds. `--again` reruns the mutants killed before, which must not survive the changed tests; a mutant of a
changed function counts as gone. The exit code is 1 if a killed mutant now survives or a mutant was not run. OUT has one
line of JSON for each mutant.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from tools.mutants.session import Plan, Result, Session
from tools.mutants.sites import Mutant, mutants_of

ROOT = Path(__file__).parents[2]
TARGETS = (
    "kvtransfer",
    "prefill_workers",
    "decode_workers",
    "baton/worker",
    "baton/ledger",
    "router/request/lifecycle.py",
    "router/request/attempt.py",
    "router/request/delivery.py",
    "router/admission",
    "baton/engine/scheduler.py",
    "baton/engine/block_pool.py",
)
UNIT = ("kvtransfer", "prefill", "decode", "worker", "ledger", "router", "engine", "tp", "history", "simulator")
IN_PROCESS = ("test_router*.py", "test_ledger*.py", "test_worker_roles.py", "test_board.py", "test_access.py")
SUITES = (
    *(f"tests/unit/{each}" for each in UNIT),
    "tests/simulation",
    *(f"tests/integration/{each}" for each in IN_PROCESS),
)
Lines = dict[str, dict[str, Any]]
DEAD = ("killed", "timeout")
PLUGINS_OFF = ("cacheprovider", "xdist", "terminal")
OPTIONS = [*(f"-pno:{each}" for each in PLUGINS_OFF), "-m", "not chaos and not serial and not slow"]


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        "python -m tools.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="file for the results, one line of JSON for each mutant")
    parser.add_argument("--count", type=int, default=1500, help="mutants to draw (default 1500)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default 1)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once (default 2)")
    parser.add_argument("--budget", type=float, default=8.0, help="seconds of tests for each mutant (default 8)")
    parser.add_argument("--targets", nargs="+", default=TARGETS, help="files and folders to change")
    parser.add_argument("--suites", nargs="+", default=SUITES, help="tests to run; patterns are allowed")
    parser.add_argument("--again", type=Path, help="results of an earlier run: its killed mutants, not a new draw")
    parser.add_argument("--resume", action="store_true", help="keep the results that OUT has, and add what is missing")
    told = parser.parse_args()
    if problem := wrong(told):
        parser.error(problem)
    before = read(told.again) if told.again else {}
    drawn = again(told.targets, before) if told.again else draw(told.targets, told.count, told.seed)
    done = read(told.out) if told.resume and told.out.exists() else {}
    results = [Result.of_line(each, done[each.name]) for each in drawn if each.name in done]
    run([each for each in drawn if each.name not in done], told, before, results)
    dead = sum(line["outcome"] in DEAD for line in before.values())
    counts = {"missing": len(drawn) - len(results), "gone": dead - len(drawn) if told.again else 0}
    sys.exit(summary(results, counts, bool(told.again)))


def wrong(told: argparse.Namespace) -> str:
    """Return a message about the first invalid argument, or an empty string."""
    for target in told.targets:
        if not (ROOT / target).exists():
            return f"--targets: there is no {target!r}; expected files and folders, relative to the repository"
    if not files(told.suites):
        return f"--suites: nothing matches {' '.join(told.suites)!r}"
    if not told.again and not 1 <= told.count <= (most := len(everything(told.targets))):
        return f"--count: must be from 1 to {most}, the mutants of these targets, got {told.count}"
    for option, path in (("--again", told.again), ("OUT (--resume)", told.out if told.resume else None)):
        try:
            if path and (option == "--again" or path.exists()):
                read(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"{option}: {path} has no results of an earlier run: {error!r}"
    return ""


def read(path: Path) -> Lines:
    """Return the lines of an earlier run, by mutant."""
    return {line["name"]: line for line in map(json.loads, path.read_text().splitlines())}


def draw(targets: list[str], count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants of the targets, drawn by `seed`, in random order."""
    return random.Random(seed).sample(everything(targets), count)


def again(targets: list[str], before: Lines) -> list[Mutant]:
    """Return the mutants killed before."""
    return [each for each in everything(targets) if before.get(each.name, {}).get("outcome") in DEAD]


def everything(targets: list[str]) -> list[Mutant]:
    """Return all mutants of the targets."""
    return [mutant for path in paths(targets) for mutant in mutants_of(ROOT, path)]


def paths(targets: list[str]) -> list[str]:
    """Return the files of the targets, relative to the repository."""
    found = [
        path for each in targets for path in ([ROOT / each] if each.endswith(".py") else (ROOT / each).rglob("*.py"))
    ]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def files(suites: list[str]) -> list[str]:
    """Return the files and folders that match the patterns, relative to the repository."""
    return [str(path) for each in suites for path in sorted(ROOT.glob(each.removeprefix(f"{ROOT}/")))]


def run(drawn: list[Mutant], told: argparse.Namespace, before: Lines, results: list[Result]) -> None:
    """Run pytest with the mutants. Each result is added to `results` and to the file immediately."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a fork would lack the threads that torch had started
    first = {name: line["killer"] for name, line in before.items()}
    with told.out.open("a" if told.resume else "w") as out, tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "killer").mkdir()

        def report(result: Result) -> None:
            results.append(result)
            print(result.as_line(), file=out, flush=True)
            if len(results) % 50 == 0:
                print(f"{len(results)}: {dict(Counter(each.outcome for each in results))}", flush=True)

        plan = Plan(ROOT, drawn, first, told.jobs, told.budget, Path(folder), report)
        pytest.main([*OPTIONS, "--basetemp", f"{folder}/tmp", *files(told.suites)], plugins=[Session(plan)])


def summary(results: list[Result], counts: dict[str, int], killed_before: bool) -> int:
    """Print a table by part and a last line of JSON; return the exit code. `counts`: mutants that were not run."""
    parts: dict[str, Counter[str]] = defaultdict(Counter)
    for each in results:
        names = each.mutant.path.split("/")
        parts["/".join(names[: 2 if names[0] in ("baton", "router") else 1])][each.outcome] += 1
    for part, counted in sorted(parts.items()):
        dead = sum(counted[each] for each in DEAD)
        print(f"{part:28} {sum(counted.values()):5} mutants {dead:5} killed  {dict(counted)}")
    lost = [each.mutant.name for each in results if killed_before and each.outcome not in DEAD]
    print(*lost, sep="\n")
    total = Counter(each.outcome for each in results)
    print(json.dumps({"mutants": len(results), **total, "lost": len(lost), **counts}))
    return 1 if lost or counts["missing"] or not results else 0


if __name__ == "__main__":
    main()
