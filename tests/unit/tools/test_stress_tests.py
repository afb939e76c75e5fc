"""The stress tool on tiny suites: its verdicts, its summary, and the end of its load."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.time_factor import scaled
from tools import stress_tests

ROOT = Path(__file__).parents[3]
LOAD = ("--busy", "1", "--hog-mib", "4", "-n", "0")
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
    """Exit code, summary, all that was printed. No process of the load is left."""
    said, _ = process.communicate(timeout=scaled(50))
    found = re.search(r"^load: .* processes \[(.*)\]$", said, re.MULTILINE)
    assert found is not None, said
    assert not [pid for pid in found[1].split(",") if psutil.pid_exists(int(pid))]
    return process.returncode, json.loads(said.splitlines()[-1]), said


def test_green_rounds_have_seeds_of_their_own_that_another_run_repeats(folder):
    code, summary, said = finished(start(folder, "test_green.py", "--rounds", "2", "--seed", "7", *LOAD))
    assert (code, summary["rounds"], summary["green"], summary["failed"]) == (0, 2, 2, [])
    seeds = [int(seed) for seed in (folder / "seeds").read_text().split()]
    assert summary["seeds"] == seeds
    assert len(set(seeds)) == 2
    assert f"round 2 of 2: seed {seeds[1]}" in said
    code, again, _ = finished(start(folder, "test_green.py", "--rounds", "1", "--seed", "7", *LOAD))
    assert (code, again["seeds"]) == (0, seeds[:1])


NONE = ("test_green.py", "--rounds", "2", "--keep-going", *LOAD, "--", "-k", "nothing")
LATE = ("test_waits.py", "--budget", "0.5", *LOAD)


@pytest.mark.parametrize(
    ("arguments", "failed", "rounds"),
    [
        (("test_red.py", "test_green.py", *LOAD), ["test_red.py::test_it[a - b]", "test_red.py::test_broken"], 1),
        pytest.param(NONE, ["no test was selected"], 2, marks=pytest.mark.slow),
        pytest.param(LATE, ["test_waits.py: the budget of 0.5 s is spent"], 1, marks=pytest.mark.slow),
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
