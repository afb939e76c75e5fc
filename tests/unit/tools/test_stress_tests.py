"""The stress tool on tiny suites, and time limits of tests, which grow with a factor that is measured once."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import time_factor
from tests.support.time_factor import BUDGET_S, HIGHEST, LOWEST, REFERENCE_S, SAMPLES, VARIABLE, measured, scaled
from tools import stress_tests

ROOT = Path(__file__).parents[3]
LOAD = ("--busy", "1", "--hog-mib", "4", "-n", "0")
NONE = ("test_green.py", "--rounds", "2", "--keep-going", *LOAD, "--", "-k", "nothing")
LATE = ("test_waits.py", "--budget", "0.5", *LOAD)
GREEN = "import os\ndef test_seed(): open('seeds', 'a').write(os.environ['BATON_TEST_SEED'] + ' ')\n"
RED = """
import pytest
@pytest.mark.parametrize("it", ["a - b", "c"])
def test_it(it): assert it == "c"
@pytest.fixture
def broken(): raise OSError("no disk")
def test_broken(broken): pass
"""
WAITS = """
import os, time
def test_waits():
    with open("reached", "w") as file: file.write("yes")
    time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_green.py").write_text(GREEN)
    (tmp_path / "test_red.py").write_text(RED)
    (tmp_path / "test_waits.py").write_text(WAITS)
    return tmp_path


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tools.stress_tests", *arguments]
    variables = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    variables |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}  # a killed tool cannot remove its folder
    return subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any], str]:
    """Return exit code, summary, and all output. Checks that no process of the load is left."""
    said, _ = process.communicate(timeout=scaled(50))
    found = re.search(r"^load: .* processes \[(.*)\]$", said, re.MULTILINE)
    assert found is not None, said
    assert not [pid for pid in found[1].split(",") if psutil.pid_exists(int(pid))]
    return process.returncode, json.loads(said.splitlines()[-1]), said


@pytest.mark.slow
def test_green_rounds_have_seeds_of_their_own_that_another_run_repeats(folder):
    code, summary, said = finished(start(folder, "test_green.py", "--rounds", "2", "--seed", "7", *LOAD))
    assert (code, summary["rounds"], summary["green"], summary["failed"]) == (0, 2, 2, [])
    seeds = [int(seed) for seed in (folder / "seeds").read_text().split()]
    assert summary["seeds"] == seeds
    assert len(set(seeds)) == 2
    assert f"round 2 of 2: seed {seeds[1]}" in said
    code, again, _ = finished(start(folder, "test_green.py", "--rounds", "1", "--seed", "7", *LOAD))
    assert (code, again["seeds"]) == (0, seeds[:1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "failed", "rounds"),
    [
        (("test_red.py", "test_green.py", *LOAD), ["test_red.py::test_it[a - b]", "test_red.py::test_broken"], 1),
        (NONE, ["no test was selected"], 2),
        (LATE, ["test_waits.py: the budget of 0.5 s is spent"], 1),
    ],
    ids=["red", "no test, and it goes on", "no time left"],
)
def test_a_round_that_is_not_green_is_named(folder, arguments, failed, rounds):
    code, summary, _ = finished(start(folder, *arguments))
    assert (code, summary["green"], summary["failed"], len(summary["seeds"])) == (1, 0, failed, rounds)
    assert not (folder / "seeds").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_tests_and_load(folder, number):
    os.mkfifo(folder / "reached")
    process = start(folder, "test_waits.py", *LOAD)
    watchdog = threading.Timer(scaled(40), process.kill)
    watchdog.start()
    try:
        assert (folder / "reached").read_text() == "yes"  # returns when the test writes it
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        code, summary, _ = finished(process)
    finally:
        watchdog.cancel()
        process.kill()
    assert (code, summary["failed"]) == (128 + number, [f"{number.name} came"])
    assert len(children) == 3
    assert not [child for child in children if child.is_running()]


def test_all_suites_are_there_by_default():
    folders = {path for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py"))}
    assert {ROOT / path for path in stress_tests.parse([]).paths} == folders


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
    variables = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    variables |= {"PYTHONPATH": str(ROOT), VARIABLE: "2.5"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "inner", "--timeout", "70"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
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
    monkeypatch.setenv(VARIABLE, "1")  # so that it is restored afterwards
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(time_factor, "measured", iter([3.0]).__next__)
    assert [scaled(2), scaled(5), os.environ[VARIABLE]] == [6, 15, "3.00"]
    for wrong in ("0", "-1", "nan", "inf", "fast"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(pytest.UsageError, match=rf"{VARIABLE} .*must be a number above 0, got '{wrong}'"):
            scaled(1)
