"""A load of all features under all kinds of faults, in pieces, with a checker for every token, ending and block.

    python benchmarks/soak.py --out build/soak --of 3                    all pieces that are not finished yet
    python benchmarks/soak.py --out build/soak --of 3 --piece 2          one piece
    python benchmarks/soak.py --out build/soak --of 3 --control          the same without recovery
    python benchmarks/soak.py --list                                     kinds of faults, with those impossible here
    python benchmarks/soak.py --out build/soak --write-docs              the tables of docs/measurements/faults.md

A piece starts 2 routers and 2+2 workers, records the right answers while nothing fails, and strikes under load. The
next fault comes after some answers and after all processes are back. Finished pieces stand in OUT/results.jsonl and
are skipped. The seed decides requests and faults; the machine decides at which token a fault strikes. `--control` sets
`retry.attempts` to 1, makes no stream resumable, and lets no client retry. The last line of stdout is one JSON object
about all finished pieces. The exit code is 1 if a requirement was broken.

Where user namespaces are allowed, a piece runs in its own network and on its own small disk, which can both fail.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/soak.py`

from baton import Client
from benchmarks.faults.check import Finding, Record, Window, check, effect, leaks
from benchmarks.faults.home import NAME, READY_S, ClusterBroken, Field, enter, wait
from benchmarks.faults.jobs import answered, draw_jobs, with_tools
from benchmarks.faults.load import Load
from benchmarks.faults.plan import KINDS, Fault, plan
from benchmarks.faults.strikes import STRIKES, Scene, why_not
from benchmarks.faults.table import append, overview, read, summary, table
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.report import write_section
from tools.history_check import check as check_histories

MODELS = ("oracle", "models/coin", "models/demo")  # by piece
BROKEN = ("wrong", "lost_or_repeated", "untyped", "leaked_blocks", "left", "broken_histories", "hung", "unhealthy")
ANSWERS_WITHIN_S = 120.0
RESULTS = "results.jsonl"


def strike(fault: Fault, field: Field, load: Load) -> Window:
    """Inject a fault at the next token, undo it, and wait until all processes are back."""
    if not load.wait(fault.answers, ANSWERS_WITHIN_S):
        print(f"no {fault.answers} answers within {ANSWERS_WITHIN_S:g} s", file=sys.stderr)
    struck, target = time.monotonic(), "none"
    try:
        with STRIKES[fault.kind](Scene(field, load, fault.draw)) as target:
            pass
        back = True
    except (ClusterBroken, AssertionError) as error:  # also from helpers of the tests
        print(f"fault {fault.number}: {fault.kind}: {error}", file=sys.stderr)
        back = False
    undone = time.monotonic()
    back = back and wait(field.healthy, READY_S)
    window = Window(fault.kind, target, struck, undone, time.monotonic() if back else math.inf)
    took = window.healthy - struck
    print(
        f"fault {fault.number}: {fault.kind} of {target}, all are back after {took:.1f} s", file=sys.stderr, flush=True
    )
    return window


def strike_all(faults: Sequence[Fault], field: Field, load: Load, until: float) -> list[Window]:
    """Strike until all faults are done, the time is over, or the cluster does not come back."""
    windows = list[Window]()
    for fault in faults:
        if time.monotonic() > until or (windows and windows[-1].healthy == math.inf):
            break
        windows.append(strike(fault, field, load))
    load.wait(8, ANSWERS_WITHIN_S)
    return windows


def run_piece(options: argparse.Namespace, number: int, home: Path) -> dict[str, Any]:
    """Run one piece and return its results."""
    began, model = time.monotonic(), options.model or MODELS[number % len(MODELS)]
    history = options.out / f"history-{number}{'-control' * options.control}-{os.getpid()}"
    field = Field(home, history, with_tools(model, options.out / "model"), ray=options.ray, control=options.control)
    kinds = [kind for kind in options.kinds if not why_not(kind, isolated=field.isolated)]
    field.wrap_clock()
    with field.running():
        with Client(field.grpc, timeout=60) as client:
            jobs = answered(draw_jobs(f"{options.seed} {number}", model), client, model)
        seed = f"{options.seed} {number}"
        with Load(field.grpc, field.http, jobs, seed, options.clients, control=options.control) as load:
            faults = plan(options.seed, number, options.faults, kinds)
            windows = strike_all(faults, field, load, began + 60 * options.minutes)
        census = field.census()
        left = field.down()
    results = evaluate(load.records, windows, census, left, history, options.out / "findings.txt")
    if any(results[name] for name in ("findings", "leaked_blocks", "broken_histories")) or any(left.values()):
        shutil.copytree(home / NAME / "logs", history / "logs")  # the disk of the state folder goes with the namespace
    settings = {"piece": number, "of": options.of, "seed": options.seed, "control": options.control, "ray": options.ray}
    return settings | {"model": model, "seconds": round(time.monotonic() - began), **results}


def evaluate(
    records: Sequence[Record],
    windows: Sequence[Window],
    census: dict[str, Any],
    left: dict[str, list[str]],
    history: Path,
    notes: Path,
) -> dict[str, Any]:
    """Check everything and write each finding to `notes`."""
    findings = check(records)
    blocks, problems = leaks(census)
    violations = check_histories([history], one_host=True).violations
    lines = [
        *map(_line, findings),
        *problems,
        *map(str, violations),
        *(f"left: {name}" for name in chain(*left.values())),
    ]
    with notes.open("a") as file:
        file.writelines(f"{history.name}: {line}\n" for line in lines)
    effects = [effect(window, records, findings) for window in windows]
    for one in effects:
        one["healthy_s"] = one["healthy_s"] if math.isfinite(one["healthy_s"]) else None
    return {
        "requests": len(records),
        "ends": dict(Counter(record.end for record in records)),
        "features": dict(Counter(record.feature for record in records)),
        "faults": effects,
        "findings": dict(Counter(finding.rule for finding in findings)),
        "leaked_blocks": blocks,
        "broken_histories": len(violations),
        "left": left,
    }


def _line(finding: Finding) -> str:
    return f"{finding.rule}: request {finding.request}: {finding.text}"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "soak", help="folder of the results")
    parser.add_argument("--piece", type=int, help="only this piece, from 0 on")
    parser.add_argument("--of", type=int, default=3, help="pieces of the whole soak")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10.0, help="a piece injects no fault after that time")
    parser.add_argument("--faults", type=int, default=len(KINDS), help="faults of a piece")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--model", help="oracle, or a folder; by default the pieces alternate")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--ray", action="store_true", help="workers are Ray actors")
    parser.add_argument("--control", action="store_true", help="without recovery")
    parser.add_argument("--list", action="store_true", help="print the kinds of faults")
    parser.add_argument("--quick", action="store_true", help="one piece of two minutes with eight faults")
    parser.add_argument("--write-docs", action="store_true", help="write the tables of all finished pieces")
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)  # the state folder in the namespace
    options = parser.parse_args(arguments)
    if options.quick:
        options.of, options.piece, options.minutes, options.faults = 1, 0, 2.0, 8
        options.out /= "quick"
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.quick and not options.home:
        (options.out / RESULTS).unlink(missing_ok=True)
    return options


def run_isolated(options: argparse.Namespace, number: int, arguments: Sequence[str]) -> None:
    """Run a piece in a namespace, or here if that is impossible, and append its results."""
    with tempfile.TemporaryDirectory(prefix="baton-soak-") as home:
        command = [sys.executable, __file__, *arguments, "--piece", str(number), "--home", home]
        code = enter(Path(home), command)
        if code is None:
            code = subprocess.run(command, check=False).returncode
    if code:
        raise SystemExit(code)


def show(options: argparse.Namespace, arguments: Sequence[str], load: float) -> int:
    """Print the results of all finished pieces, and write them if required. Return the exit code."""
    pieces = read(options.out / RESULTS)
    figures = summary(pieces)
    for name, control in (("soak", False), ("control", True)):
        some = [piece for piece in pieces if piece["control"] == control]
        shown = f"{overview(some)}\n\n{table(some)}"
        print(f"{name}\n{shown}\n")
        if options.write_docs:
            write_section("measurements/faults.md", "soak", arguments, load, shown, f"soak-{name}")
    print(json.dumps({"benchmark": "soak", **figures}))
    return int(any(figures[name] for name in BROKEN))


def kinds_here() -> str:
    """Return one line for each kind of fault, with the reason if it is impossible here."""
    with tempfile.TemporaryDirectory(prefix="baton-soak-") as home:
        isolated = enter(Path(home), ["true"]) is not None
    reasons = {kind: why_not(kind, isolated=isolated) for kind in KINDS}
    return "\n".join(f"{kind:<20} {f'not here: {why}' if why else 'yes'}" for kind, why in reasons.items())


def main(arguments: Sequence[str]) -> int:
    """Run the pieces that are not finished and return the exit code."""
    options, load = parse(arguments), os.getloadavg()[0]
    if options.list:
        print(kinds_here())
        return 0
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the cluster is stopped then, too
    if options.home:
        append(options.out / RESULTS, run_piece(options, options.piece, options.home))
        return 0
    key = (options.seed, options.of, options.control, options.ray)
    done = {(p["seed"], p["of"], p["control"], p["ray"], p["piece"]) for p in read(options.out / RESULTS)}
    for number in range(options.of) if options.piece is None else [options.piece]:
        if (*key, number) in done:
            print(f"piece {number} is finished", file=sys.stderr)
        elif not options.write_docs:
            run_isolated(options, number, arguments)
    return show(options, arguments, load)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
