"""Run test suites under CPU and memory load, several times, each time with a new seed:

    .venv/bin/python -m tools.stress_tests [PATH ...] [--rounds 3] [--busy 2] [--hog-mib 2048] [-- PYTEST OPTIONS]

Each suite is a separate pytest. A round is green if all suites are. The first red suite ends the run unless
`--keep-going` is given. The last line is a JSON summary. The exit code is 1 unless all rounds were green. The load ends
with the run, even after a signal. Tests that fail only here depend on the machine's speed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
SUITES = ("unit", "guards", "integration", "simulation", "models", "helm", "page", "netns", "e2e")
MARKS = "not chaos and not serial"
FAILED_VARIABLE = "BATON_STRESS_FAILED"
GRACE_S = 20.0  # for an interrupted pytest to end its fixtures
GREEN, NO_TESTS = 0, 5  # exit codes of pytest
MIB = 1 << 20

# Both exit when this program has ended in any way.
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"
HOG = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    held = []
    for _ in range(int(sys.argv[2])):
        held.append(bytearray(1 << 20))
        for block in held[-64:]:
            block[::4096] = bytes([len(held) % 256]) * 256
"""


class Stopped(Exception):
    """End of the run by a signal or the budget."""

    def __init__(self, why: str, code: int = 1) -> None:
        super().__init__(why)
        self.code = code


@dataclass
class Summary:
    """Result of a run: requested rounds, green rounds, their seeds, and the ids of failed tests."""

    rounds: int
    green: int = 0
    seeds: list[int] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Return the summary as one line of JSON."""
        return json.dumps({**vars(self), "failed": list(dict.fromkeys(self.failed))})


# Pytest loads this module as a plugin that records the ids of failures. Duplicates come from workers of xdist.


def pytest_runtest_logreport(report: Any) -> None:
    """Record a failed test."""
    note(report)


def pytest_collectreport(report: Any) -> None:
    """Record a file that cannot be collected."""
    note(report)


def note(report: Any) -> None:
    """Append the id of a failed test to the file named in the environment."""
    if report.failed and FAILED_VARIABLE in os.environ:
        with Path(os.environ[FAILED_VARIABLE]).open("a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\n")


@contextmanager
def load(busy: int, hog_mib: int) -> Iterator[list[int]]:
    """Run busy loops and a memory hog during the block. Yields their process ids."""
    mine, started = str(os.getpid()), list[subprocess.Popen[bytes]]()
    try:
        for _ in range(busy):
            started.append(subprocess.Popen([sys.executable, "-I", "-S", "-c", BUSY, mine]))
        if hog_mib:
            started.append(subprocess.Popen([sys.executable, "-I", "-S", "-c", HOG, mine, str(hog_mib)]))
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a pytest so that it ends its fixtures, and kill it after the grace period."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_suite(suite: str, options: argparse.Namespace, seed: int, until: float) -> tuple[int, list[str]]:
    """Return pytest's exit code and the ids of failed tests."""
    marks = ["-m", options.marks] if options.marks else []
    parallel = ["-n", str(options.workers), "--dist", "loadgroup"] if options.workers else []
    command = [sys.executable, "-m", "pytest", "-p", "tools.stress_tests", *marks, *parallel, *options.pytest, suite]
    with tempfile.TemporaryDirectory(prefix="baton-stress-") as folder:
        failed = Path(folder, "failed")
        failed.touch()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        variables = {"BATON_TEST_SEED": str(seed), FAILED_VARIABLE: str(failed), "PYTHONPATH": path}
        process = subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True)
        try:
            code = process.wait(max(until - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            raise Stopped(f"{suite}: the budget of {options.budget:g} s is spent") from None
        finally:
            end(process)
        ids = failed.read_text(encoding="utf-8").splitlines()
    return code, ids


def run_round(options: argparse.Namespace, seed: int, until: float, summary: Summary) -> bool:
    """Return whether all suites were green. Stop at the first red one unless `--keep-going` is given."""
    codes = []
    for suite in options.paths:
        code, ids = run_suite(suite, options, seed, until)
        codes.append(code)
        if code in (GREEN, NO_TESTS):
            continue
        summary.failed += ids or [f"{suite}: pytest ended with exit code {code}"]
        if not options.keep_going:
            return False
    if set(codes) == {NO_TESTS}:
        summary.failed.append("no test was selected")
    return set(codes) <= {GREEN, NO_TESTS} and GREEN in codes


def run_rounds(options: argparse.Namespace, summary: Summary) -> None:
    """Run all rounds under load, or up to the first red one."""
    draw, until = random.Random(options.seed), time.monotonic() + options.budget
    with load(options.busy, options.hog_mib) as pids:
        print(f"load: {options.busy} busy loops, {options.hog_mib} MiB touched, processes {pids}", flush=True)
        for number in range(1, options.rounds + 1):
            seed = draw.randrange(2**31)
            summary.seeds.append(seed)
            print(f"round {number} of {options.rounds}: seed {seed} (BATON_TEST_SEED={seed})", flush=True)
            if run_round(options, seed, until, summary):
                summary.green += 1
            elif not options.keep_going:
                return


def stop(number: int, frame: FrameType | None) -> None:
    """Handle a signal: raise, so that all blocks end their processes."""
    raise Stopped(f"{signal.Signals(number).name} came", 128 + number)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse options. Those after `--` are for pytest. The hog takes at most half of the available memory."""
    own, theirs = list(arguments), list[str]()
    if "--" in own:
        at = own.index("--")
        own, theirs = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(prog="tools.stress_tests", description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", help="suites; default: all below tests/")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=int, default=2, help="busy loops")
    parser.add_argument(
        "--hog-mib", type=int, default=2048, help="memory that is allocated and touched again and again"
    )
    parser.add_argument("--seed", type=int, help="draws the seeds of the rounds; default: random")
    parser.add_argument("--keep-going", action="store_true", help="go on after a red suite")
    parser.add_argument("--budget", type=float, default=3 * 3600.0, help="seconds for all rounds")
    parser.add_argument("-m", dest="marks", default=MARKS, help=f"marks, as pytest takes them; default: {MARKS}")
    parser.add_argument("-n", dest="workers", type=int, default=2, help="parallel workers of pytest; 0: none")
    options = parser.parse_args(own)
    options.paths = options.paths or [str(ROOT / "tests" / name) for name in SUITES]
    options.pytest = theirs
    options.hog_mib = min(options.hog_mib, psutil.virtual_memory().available // 2 // MIB)
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the rounds and return the exit code."""
    options = parse(arguments)
    summary, code = Summary(options.rounds), 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        run_rounds(options, summary)
    except Stopped as error:
        code = error.code
        summary.failed.append(str(error))
    print(summary.line(), flush=True)
    return code or int(summary.green < summary.rounds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
