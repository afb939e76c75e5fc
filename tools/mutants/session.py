"""One pytest, collected once, that runs tests on mutants in forked processes.

It first runs all tests without a change and records the time and the lines (by `coverage`) of each test. Tests that
fail or are skipped are left out. Then each mutant gets a fork with the changed code of its function, and the tests that
execute its lines run until one fails. Subprocesses of tests run the unchanged code, so only in-process tests count.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coverage
import hypothesis
import psutil
import pytest

from tools.mutants.sites import Mutant, mutated_code

PR_SET_PDEATHSIG = 1  # linux/prctl.h
SURVIVED, KILLED, UNFIT = 0, 1, 3
MARK = "BATON_MUTANT"  # environment variable of a fork and its subprocesses
MEMORY_BYTES = 12 << 30  # address space beyond that of the collected session
NEAR = {"baton/worker": "worker", "baton/ledger": "ledger", "baton/engine": "engine", "kvtransfer": "kvtransfer",
        "prefill_workers": "prefill", "decode_workers": "decode", "router": "router"}  # fmt: skip


@dataclass
class Result:
    """Result of a mutant. `outcome`: killed, timeout (also killed), survived, uncovered or unfit (code did not fit)."""

    mutant: Mutant
    outcome: str
    killer: str = ""
    tests: int = 0
    seconds: float = 0.0

    @classmethod
    def of_line(cls, mutant: Mutant, line: dict[str, Any]) -> Result:
        """Return the result that `as_line` wrote."""
        return cls(mutant, line["outcome"], line["killer"], line["tests"], line["seconds"])

    def as_line(self) -> str:
        """Return one line of JSON."""
        kept = {"outcome": self.outcome, "killer": self.killer, "tests": self.tests, "seconds": round(self.seconds, 2)}
        return json.dumps({"name": self.mutant.name, "lines": [self.mutant.first, self.mutant.last], **kept})


@dataclass
class Plan:
    """Work of a session. `first`: the first test to run for each mutant; `report` receives each result."""

    root: Path
    mutants: list[Mutant]
    first: dict[str, str]
    jobs: int
    budget_s: float
    folder: Path
    report: Callable[[Result], None]


@dataclass
class Seen:
    """Measurements without a change: seconds of each passed test, and the tests of each line of a file."""

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, set[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))


class Session:
    """Plugin that replaces pytest's loop over tests."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._failed = ""
        self._seconds: dict[str, float] = defaultdict(float)
        self._bad: set[str] = set()
        self._stop_at_failure = False
        self._told: Path | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Turn off hypothesis' shrinking, which is slow, and its database, which would link mutants."""
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile("mutants", hypothesis.settings(), phases=phases, database=None)
        hypothesis.settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Measure, then run the mutants."""
        if session.testsfailed:
            raise session.Failed(f"{session.testsfailed} files of tests cannot be collected")
        for path in {mutant.path for mutant in self._plan.mutants}:
            importlib.import_module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        functions = _functions(self._plan.root)
        began = time.monotonic()
        seen = self._measure(session.items)
        print(
            f"measured {len(seen.seconds)} of {len(session.items)} tests in {time.monotonic() - began:.0f} s",
            flush=True,
        )
        _pool((self._task(each, functions, seen, session.items) for each in self._plan.mutants), self._plan.jobs)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record failures, skips and times. End the fork of a mutant at its first failure."""
        self._seconds[report.nodeid] += report.duration
        if report.outcome != "passed":
            self._bad.add(report.nodeid)
        if report.failed and self._stop_at_failure and self._told is not None:
            self._told.write_text(report.nodeid)
            os._exit(KILLED)

    def _measure(self, items: list[pytest.Item]) -> Seen:
        parts = [_by_file(items, self._plan.jobs, number) for number in range(self._plan.jobs)]
        _pool((self._measuring(part, number) for number, part in enumerate(parts)), self._plan.jobs)
        seen = Seen()
        for number in range(len(parts)):
            seen.seconds.update(json.loads((self._plan.folder / f"seconds.{number}").read_text()))
            data = coverage.CoverageData(str(self._plan.folder / f"lines.{number}"))
            data.read()
            for path in data.measured_files():
                known = seen.lines[str(Path(path).relative_to(self._plan.root))]
                for line, tests in data.contexts_by_lineno(path).items():
                    known[line].update(test for test in tests if test in seen.seconds)
        return seen

    def _measuring(self, items: list[pytest.Item], number: int) -> Task:
        def child() -> int:
            files = [str(self._plan.root / mutant.path) for mutant in self._plan.mutants]
            recorded = self._plan.folder / f"lines.{number}"
            watch = coverage.Coverage(str(recorded), include=files, config_file=False, messages=False)
            watch.start()
            for item, following in _with_next(items):
                watch.switch_context(item.nodeid)
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            watch.stop()
            watch.save()
            good = {test: seconds for test, seconds in self._seconds.items() if test not in self._bad}
            (self._plan.folder / f"seconds.{number}").write_text(json.dumps(good))
            return 0

        def ended(code: int, _: float) -> None:
            if code:
                raise RuntimeError(f"the run without a change ended with code {code}")

        return Task(f"measure-{number}", child, ended, limit_s=7200)

    def _task(self, mutant: Mutant, functions: Functions, seen: Seen, items: list[pytest.Item]) -> Task | None:
        covering = self._covering(mutant, seen)
        if not covering:
            self._plan.report(Result(mutant, "uncovered"))
            return None
        by_name = {item.nodeid: item for item in items}
        told = self._plan.folder / "killer" / str(abs(hash(mutant.name)))

        def child() -> int:
            if not _exchange(self._plan.root, mutant, functions):
                return UNFIT
            self._stop_at_failure, self._told = True, told
            try:
                self._run([by_name[test] for test in covering], seen)
            except BaseException as error:  # noqa: BLE001  # the boundary of this process: pytest itself was stopped
                told.write_text(repr(error))
                return KILLED
            return SURVIVED

        def ended(code: int, seconds: float) -> None:
            killer = told.read_text() if told.exists() else ""
            outcome = {SURVIVED: "survived", UNFIT: "unfit", KILLED: "killed"}.get(code, "timeout")
            self._plan.report(Result(mutant, outcome, killer, len(covering), seconds))

        return Task(mutant.name, child, ended, 60 + 10 * sum(seen.seconds[test] for test in covering))

    def _run(self, items: list[pytest.Item], seen: Seen) -> None:
        for item, following in _with_next(items):
            item.add_marker(pytest.mark.timeout(10 + 10 * seen.seconds[item.nodeid]), append=False)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def _covering(self, mutant: Mutant, seen: Seen) -> list[str]:
        """Return the tests of the mutant's lines: the given first one, then the nearest and quickest."""
        known = seen.lines.get(mutant.path, {})
        tests = {test for line in range(mutant.first, mutant.last + 1) for test in known.get(line, ())}
        near = next(
            (f"tests/unit/{name}/" for part, name in NEAR.items() if mutant.path.startswith(part)), "tests/unit/"
        )
        order = sorted(tests, key=lambda test: (not test.startswith(near), seen.seconds[test], test))
        begin = self._plan.first.get(mutant.name, "")
        chosen, spent = [begin] if begin in tests else [], 0.0
        for test in order:
            spent += seen.seconds[test] + 0.01
            if spent > self._plan.budget_s:
                break
            chosen += [test] if test != begin else []
        return chosen or order[:1]


Functions = dict[tuple[str, str, int], list[types.FunctionType]]


@dataclass
class Task:
    """Work for a fork: `child` returns the exit code, `ended` receives it with the seconds it took."""

    name: str
    child: Callable[[], int]
    ended: Callable[[int, float], None]
    limit_s: float


@dataclass
class _Running:
    task: Task
    began: float


def _functions(root: Path) -> Functions:
    """Return all live functions of the product, by file, qualified name and first line."""
    found: Functions = defaultdict(list)
    gc.unfreeze()  # the list lacks frozen objects, and the process may have frozen what it imported
    for each in gc.get_objects():
        if type(each) is types.FunctionType and each.__code__.co_filename.startswith(str(root)):
            code = each.__code__
            found[code.co_filename, code.co_qualname, code.co_firstlineno].append(each)
    return found


def _exchange(root: Path, mutant: Mutant, functions: Functions) -> bool:
    """Give the live functions the changed code. Returns False if there are none or it does not fit."""
    code = mutated_code(root, mutant)
    alive = functions.get((code.co_filename, code.co_qualname, code.co_firstlineno), [])
    for function in alive:
        try:
            function.__code__ = code
        except ValueError:  # different free variables
            return False
    return bool(alive)


def _by_file(items: list[pytest.Item], parts: int, number: int) -> list[pytest.Item]:
    files = list(dict.fromkeys(str(item.path) for item in items))
    mine = set(files[number::parts])
    return [item for item in items if str(item.path) in mine]


def _with_next(items: list[pytest.Item]) -> Iterable[tuple[pytest.Item, pytest.Item | None]]:
    return zip(items, [*items[1:], None], strict=True)


def _pool(tasks: Iterator[Task | None], jobs: int) -> None:
    """Run tasks, at most `jobs` in parallel, and kill the processes that each leaves behind."""
    running: dict[int, _Running] = {}
    for task in tasks:
        if task is None:
            continue
        while len(running) >= jobs:
            _reap(running)
        running[_fork(task)] = _Running(task, time.monotonic())
    while running:
        _reap(running)


def _fork(task: Task) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = UNFIT
    with contextlib.suppress(BaseException):  # process boundary
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # ends a looping mutant with this program
        os.environ[MARK] = task.name
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
        code = task.child()
    os._exit(code)


def _reap(running: dict[int, _Running]) -> None:
    """Wait until one task has ended or is over its limit."""
    while True:
        for pid, each in running.items():
            seconds = time.monotonic() - each.began
            if seconds > each.task.limit_s:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del running[pid]
                _sweep(each.task.name)
                each.task.ended(os.waitstatus_to_exitcode(status), seconds)
                return
        time.sleep(0.005)


def _sweep(name: str) -> None:
    """Kill the processes left by the fork's tests."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == name:
                process.kill()
