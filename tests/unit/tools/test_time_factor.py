"""Time limits of tests grow with a factor that is measured once for each run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import time_factor
from tests.support.time_factor import BUDGET_S, HIGHEST, LOWEST, REFERENCE_S, SAMPLES, VARIABLE, measured, scaled

ROOT = Path(__file__).parents[3]
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
