"""Tools that run tests: the stress tool, the mutation tool, and time limits.

Time limits grow with a factor that is measured once.
"""

import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support import time_factor
from tests.support.time_factor import (
    BUDGET_S,
    HIGHEST,
    LOWEST,
    MEASURED,
    REFERENCE_S,
    SAMPLES,
    VARIABLE,
    Deadline,
    measured,
    scaled,
)
from tests.support.waiting import at_most
from tools import stress_tests
from tools.mutants.__main__ import main as mutants_main
from tools.mutants.sites import mutants_of

ROOT = Path(__file__).parents[3]


def started(folder: Path, module: str, *arguments: object, **variables: str) -> subprocess.Popen[str]:
    """Start a module in `folder`, without the variables of this pytest."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    clean = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    clean |= {"PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen(command, cwd=folder, env=clean, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def python(folder: Path, module: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a module in `folder` to its end."""
    process = started(folder, module, *arguments, **variables)
    return subprocess.CompletedProcess(process.args, *outcome(process))


def outcome(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error of the process when it has ended."""
    output, errors = process.communicate()
    return process.returncode, output, errors


# --- the stress tool on tiny suites


LOAD = ("--busy", "1", "--hog-mib", "4", "-n", "0")
NONE = ("test_green.py", "--rounds", "2", "--keep-going", *LOAD, "--", "-k", "nothing")
LATE = ("test_waits.py", "--budget", "0.5", *LOAD)
GREEN = "import os\ndef test_seed(): open('seeds', 'a').write(os.environ['BATON_TEST_SEED'] + ' ')\n"
WAITS = "import time\ndef test_waits(): time.sleep(600)\n"
RED = """
import pytest
@pytest.mark.parametrize("it", ["a - b", "c"])
def test_it(it): assert it == "c"
@pytest.fixture
def broken(): raise OSError("no disk")
def test_broken(broken): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "failed", "rounds"),
    [
        (("test_green.py", "--rounds", "2", "--seed", "7", *LOAD), [], 2),
        (("test_red.py", "test_green.py", *LOAD), ["test_red.py::test_it[a - b]", "test_red.py::test_broken"], 1),
        (NONE, ["no test was selected"], 2),
        (LATE, ["test_waits.py: the budget of 0.5 s is spent"], 1),
    ],
    ids=["green", "red", "no test, and it goes on", "no time left"],
)
def test_rounds_have_their_own_seeds_and_what_is_not_green_is_named(tmp_path, arguments, failed, rounds):
    texts = {
        "pytest.ini": "[pytest]\n",
        "test_green.py": GREEN,
        "test_red.py": RED,
        "test_waits.py": WAITS,
        "seeds": "",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    done = python(tmp_path, "tools.stress_tests", *arguments)
    summary, green = json.loads(done.stdout.splitlines()[-1]), 0 if failed else rounds
    assert (done.returncode, summary["green"], summary["failed"]) == (bool(failed), green, failed)
    assert len(set(summary["seeds"])) == rounds
    if "--seed" in arguments:
        draw = random.Random(7)
        assert summary["seeds"] == [draw.randrange(2**31) for _ in range(rounds)]
    assert [int(seed) for seed in (tmp_path / "seeds").read_text().split()] == summary["seeds"][:green]
    found = re.search(r"^load: .* processes \[(.*)\]$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    assert not [pid for pid in found[1].split(",") if psutil.pid_exists(int(pid))]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_tests_and_load(tmp_path, number):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_waits.py").write_text(WAITS.replace(": ", ": open('reached', 'w').close(); "))
    os.mkfifo(tmp_path / "reached")
    process = started(tmp_path, "tools.stress_tests", "test_waits.py", *LOAD)
    (tmp_path / "reached").read_text()  # returns when the test has opened it
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    code, output, _ = outcome(process)
    assert (code, json.loads(output.splitlines()[-1])["failed"]) == (128 + number, [f"{number.name} came"])
    assert len(children) == 3
    assert not [child for child in children if child.is_running()]


def test_all_suites_are_there_by_default():
    folders = {path for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py"))}
    assert {ROOT / path for path in stress_tests.parse([]).paths} == folders


# --- time limits


SUITE = """
import pytest
def test_plain(): pass
@pytest.mark.timeout(timeout=10, method="thread")
def test_named(): pass
@pytest.mark.parametrize("it", ["a", pytest.param("b", marks=pytest.mark.timeout(20))])
def test_each(it): pass
@pytest.mark.timeout(40)
class TestClass:
    def test_inside(self): pass
    @pytest.mark.timeout(50)
    def test_closer(self): pass
"""
LIMITS = {"test_named": 10, "test_each[b]": 20, "test_inside": 40, "test_closer": 50}
NOTE = """
import pytest
class Note:
    def pytest_timeout_set_timer(self, item, settings):
        with open("limits", "a") as file:
            print(item.name, settings.timeout, settings.method, file=file)
@pytest.hookimpl
def pytest_configure(config):
    config.pluginmanager.register(Note())
"""


def test_limits_are_multiplied_and_one_that_the_caller_gives_stays(tmp_path):
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "conftest.py").write_text(NOTE)
    (tmp_path / "inner" / "test_one.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 60\naddopts = --import-mode=importlib\n")
    options = ("-p", "no:cacheprovider", "inner", "--timeout", "70")
    done = python(tmp_path, "pytest", *options, **{VARIABLE: "2.5"})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in (tmp_path / "limits").read_text().splitlines()]
    marked = {name: 2.5 * limit for name, limit in LIMITS.items()}
    assert {name: float(limit) for name, limit, _ in rows} == marked | {"test_plain": 70, "test_each[a]": 70}
    assert {name for name, _, method in rows if method == "thread"} == {"test_named"}
    assert f"time limits: x 2.5 (set with {VARIABLE})" in done.stdout


@pytest.mark.parametrize(
    ("seconds", "factor"),
    [
        ([REFERENCE_S / 2] * SAMPLES, LOWEST),
        ([REFERENCE_S, REFERENCE_S * 3, REFERENCE_S * 2] + [REFERENCE_S * 1.5] * SAMPLES, 1.5),
        ([BUDGET_S / 2], BUDGET_S / 2 / REFERENCE_S),
        ([99.0], HIGHEST),
    ],
)
def test_the_factor_is_the_median_within_bounds_and_a_slow_machine_takes_few_samples(seconds, factor):
    samples = iter([*seconds, *[seconds[0]] * SAMPLES])
    assert measured(lambda: next(samples)) == pytest.approx(factor)
    assert len(list(samples)) >= len(seconds)


def test_it_is_measured_once_and_kept_for_processes_of_the_run(monkeypatch):
    for name in (VARIABLE, MEASURED):
        monkeypatch.setenv(name, "1")  # so that it is restored afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(time_factor, "measured", iter([3.0]).__next__)
    assert [scaled(2), scaled(5), os.environ[VARIABLE], os.environ[MEASURED]] == [6, 15, "3.00", "3.00"]
    for wrong in ("0", "-1", "nan", "inf", "fast"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(pytest.UsageError, match=rf"{VARIABLE} .*must be a number above 0, got '{wrong}'"):
            scaled(1)


async def test_a_block_is_cancelled_after_its_time():
    with pytest.raises(TimeoutError):
        async with at_most(0.01):
            await asyncio.Event().wait()
    async with at_most(60.0):
        pass


def test_a_wait_is_longer_if_the_machine_became_slower(monkeypatch):
    monkeypatch.setenv(VARIABLE, "2")
    monkeypatch.setenv(MEASURED, "2")
    now, factors = [100.0], iter([5.0, 3.0])
    monkeypatch.setattr(time_factor, "measured", factors.__next__)
    deadline = Deadline(10.0, lambda: now[0])
    for now[0], passed in ((119.9, False), (120.0, False), (149.9, False), (150.0, True)):
        assert deadline.passed() == passed
    assert not list(factors), "measured at 120 and at 150 s"


def test_a_factor_that_the_user_gave_is_not_measured_again(monkeypatch):
    """A run that measured one may have started this run, so the other variable may be there."""
    monkeypatch.setenv(VARIABLE, "0.5")
    monkeypatch.setenv(MEASURED, "2.00")
    monkeypatch.setattr(time_factor, "measured", lambda: 5.0)
    now = [100.0]
    deadline = Deadline(10.0, lambda: now[0])
    for now[0], passed in ((104.9, False), (105.0, True)):
        assert deadline.passed() == passed


# --- the mutation tool: its changes, and the test runs that detect them


SEEING, BLIND = "tests/guards/test_sync_client.py", "tests/guards/test_constraints.py"  # without torch


SOURCE = '''
def kept(text: str = "default") -> None:
    """A docstring."""
    log.info("a message", number=1)


class Range:
    def holds(self, low: int, high: int) -> bool:
        if not self.open:
            raise ValueError(f"{low + 1} is closed")
        self.asked += 1
        return low <= self.value and self.value < high
'''


def test_changes_of_behaviour_are_listed_and_nothing_else(tmp_path: Path) -> None:
    kinds = ("negate:0", "not:0", "remove:0", "remove:1", "constant:0", "return:0", "logic:0", "compare:0", "compare:1")
    for above in ("", "import os\n\n\n"):  # lines above change no name
        (tmp_path / "source.py").write_text(above + SOURCE)
        assert [each.name for each in mutants_of(tmp_path, "source.py")] == [
            f"source.py::Range.holds::{kind}" for kind in kinds
        ]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--targets", "router/none.py"], "--targets: there is no 'router/none.py'"),
        (["--targets", "router/admission/fair_queue.py", "--count", "9999"], "--count: must be from 1 to"),
        (["--suites", "tests/none"], "--suites: nothing matches 'tests/none'"),
        (["--again", "README.md"], "--again: README.md has no results"),
        (["--again", "none.jsonl"], "--again: none.jsonl has no results"),
    ],
)
def test_wrong_arguments_of_the_mutation_tool_are_named(monkeypatch, capsys, tmp_path, options: list[str], named: str):
    monkeypatch.setattr("sys.argv", ["mutants", str(tmp_path / "out.jsonl"), *options])
    with pytest.raises(SystemExit) as ended:
        mutants_main()
    assert (ended.value.code, named in capsys.readouterr().err) == (2, True)
    assert not (tmp_path / "out.jsonl").exists()


def mutants(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return python(ROOT, "tools.mutants", out, "--jobs", 1, "--targets", "tools/gen_sync_client.py", *options)


@pytest.mark.slow
def test_what_was_killed_before_must_be_killed_again(tmp_path: Path) -> None:
    before, again = tmp_path / "before.jsonl", tmp_path / "again.jsonl"
    drawn = mutants(before, "--suites", SEEING, "--count", "8")
    killed = [line["name"] for line in map(json.loads, before.read_text().splitlines()) if line["outcome"] == "killed"]
    assert (drawn.returncode, len(killed) > 0) == (0, True), drawn.stdout + drawn.stderr

    same = mutants(again, "--suites", SEEING, "--again", str(before))
    last = json.loads(same.stdout.splitlines()[-1])
    assert (same.returncode, last["lost"], last["missing"], last["gone"]) == (0, 0, 0, 0), same.stdout

    blind = mutants(again, "--suites", BLIND, "--again", str(before))
    assert blind.returncode == 1
    assert set(killed) <= set(blind.stdout.splitlines())
