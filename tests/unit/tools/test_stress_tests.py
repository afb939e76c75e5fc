"""The stress tool on tiny suites: its verdicts, its summary, and the end of its load."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
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
    pids = loads(said)
    assert pids
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    return process.returncode, json.loads(said.splitlines()[-1]), said


def loads(said: str) -> list[int]:
    found = re.search(r"^load: .* processes \[(.*)\]$", said, re.MULTILINE)
    assert found is not None, said
    return [int(pid) for pid in found[1].split(",")]


def test_green_rounds_have_seeds_of_their_own_that_another_run_repeats(folder):
    code, summary, said = finished(start(folder, "test_green.py", "--rounds", "2", "--seed", "7", *LOAD))
    assert (code, summary["rounds"], summary["green"], summary["failed"]) == (0, 2, 2, [])
    seeds = [int(seed) for seed in (folder / "seeds").read_text().split()]
    assert summary["seeds"] == seeds
    assert len(set(seeds)) == 2
    assert [f"round {number + 1} of 2: seed {seed}" in said for number, seed in enumerate(seeds)] == [True, True]
    code, again, _ = finished(start(folder, "test_green.py", "--rounds", "1", "--seed", "7", *LOAD))
    assert (code, again["seeds"]) == (0, seeds[:1])


def test_a_red_suite_ends_the_run_and_is_named(folder):
    code, summary, _ = finished(start(folder, "test_red.py", "test_green.py", *LOAD))
    failed = ["test_red.py::test_it[a - b]", "test_red.py::test_broken"]
    assert (code, summary["green"], summary["failed"]) == (1, 0, failed)
    assert len(summary["seeds"]) == 1
    assert not (folder / "seeds").exists()


@pytest.mark.slow
def test_it_can_go_on_after_a_round_without_a_test(folder):
    options = ("--rounds", "2", "--keep-going", *LOAD, "--", "-k", "nothing")
    code, summary, _ = finished(start(folder, "test_green.py", *options))
    assert (code, summary["green"], summary["failed"]) == (1, 0, ["no test was selected"])
    assert len(summary["seeds"]) == 2


@pytest.mark.slow
def test_a_spent_budget_ends_it(folder):
    code, summary, _ = finished(start(folder, "test_waits.py", "--budget", "0.5", *LOAD))
    assert (code, summary["green"], summary["failed"]) == (1, 0, ["test_waits.py: the budget of 0.5 s is spent"])


@pytest.fixture
def waiting(folder) -> Iterator[subprocess.Popen[str]]:
    """The tool while its test waits; killed at the end, and if that test is never reached."""
    os.mkfifo(folder / "reached")
    process = start(folder, "test_waits.py", *LOAD)
    watchdog = threading.Timer(scaled(40), process.kill)
    watchdog.start()
    try:
        assert (folder / "reached").read_text() == "yes"  # returns when the test writes it
        yield process
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_tests_and_load(waiting, number):
    children = psutil.Process(waiting.pid).children(recursive=True)
    assert len(children) == 3
    waiting.send_signal(number)
    code, summary, _ = finished(waiting)
    assert (code, summary["failed"]) == (128 + number, [f"{number.name} came"])
    assert not [child for child in children if child.is_running()]


@pytest.mark.slow
def test_the_load_ends_with_a_killed_program(waiting):
    assert waiting.stdout is not None
    load = [psutil.Process(pid) for pid in loads(waiting.stdout.readline())]
    tests = [child for child in psutil.Process(waiting.pid).children() if child not in load]
    waiting.kill()
    waiting.wait()
    for child in tests:
        child.kill()
    _, alive = psutil.wait_procs(load, timeout=scaled(20))
    assert not alive


def test_all_suites_are_there_by_default():
    assert all(Path(path).is_dir() for path in stress_tests.parse([]).paths)
    named = {Path(path).name for path in stress_tests.parse([]).paths}
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py"))}
    assert named == folders
