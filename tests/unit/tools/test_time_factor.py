"""Time limits of tests grow with a factor that is measured once for each run."""

from __future__ import annotations

import os
import re
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

@pytest.mark.timeout(300)
def test_marked(): pass

@pytest.mark.timeout(timeout=10, method="thread")
def test_named(): pass

@pytest.mark.parametrize("it", ["a", pytest.param("b", marks=pytest.mark.timeout(20))])
def test_each(it): pass

@pytest.mark.timeout(0)
def test_endless(): pass

@pytest.mark.timeout(40)
class TestClass:
    def test_inside(self): pass
    @pytest.mark.timeout(50)
    def test_closer(self): pass
"""
MODULE = "import pytest\npytestmark = pytest.mark.timeout(30)\ndef test_of_module(): pass\n"
LIMITS = {
    "test_plain": 60, "test_marked": 300, "test_named": 10, "test_each[a]": 60, "test_each[b]": 20, "test_inside": 40,
    "test_closer": 50, "test_of_module": 30,
}  # fmt: skip
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


def run(folder: Path, *options: str, **environment: str) -> tuple[dict[str, float], str]:
    """The limits that pytest-timeout is given, under the real conftest.py, and all that pytest prints."""
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "inner").mkdir()
    (folder / "inner" / "conftest.py").write_text(NOTE)
    (folder / "inner" / "test_one.py").write_text(SUITE)
    (folder / "inner" / "test_two.py").write_text(MODULE)
    (folder / "pytest.ini").write_text("[pytest]\ntimeout = 60\naddopts = --import-mode=importlib\n")
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE and "PYTEST" not in name}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    variables = {**inherited, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in (folder / "limits").read_text().splitlines()]
    assert {name for name, _, method in rows if method == "thread"} == {"test_named"}
    return {name: float(limit) for name, limit, _ in rows}, done.stdout


def test_limits_are_multiplied_and_one_that_the_caller_gives_stays(tmp_path):
    limits, said = run(tmp_path, "inner", "--timeout", "70", **{VARIABLE: "2.5"})
    assert limits == {name: 70 if limit == 60 else 2.5 * limit for name, limit in LIMITS.items()}
    assert f"time limits: x 2.5 (set with {VARIABLE})" in said


@pytest.mark.slow
def test_parallel_workers_take_the_factor_that_their_run_measured(tmp_path):
    limits, said = run(tmp_path, "inner", "-n", "2")
    found = re.search(r"time limits: x ([\d.]+) ", said)
    assert found is not None
    assert limits == pytest.approx({name: float(found[1]) * limit for name, limit in LIMITS.items()}, rel=1e-3)


@pytest.mark.parametrize(
    ("seconds", "factor"),
    [
        ([REFERENCE_S / 2] * SAMPLES, LOWEST),
        ([REFERENCE_S * 1.5] * SAMPLES, 1.5),
        ([REFERENCE_S, REFERENCE_S * 3, REFERENCE_S * 2] + [REFERENCE_S] * SAMPLES, 1.0),
        ([BUDGET_S / 2], BUDGET_S / 2 / REFERENCE_S),
        ([99.0], HIGHEST),
    ],
)
def test_the_factor_is_the_median_within_bounds_and_a_slow_machine_takes_few_samples(seconds, factor):
    samples = iter([*seconds, *[seconds[0]] * SAMPLES])
    assert measured(lambda: next(samples)) == pytest.approx(factor)
    assert len(list(samples)) >= len(seconds)


def test_it_is_measured_once_and_kept_in_the_environment(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")  # so that it is restored afterwards
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(time_factor, "measured", iter([3.0]).__next__)
    assert [scaled(2), scaled(5)] == [6, 15]
    assert os.environ[VARIABLE] == "3.00"


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "fast"])
def test_a_wrong_factor_is_refused(monkeypatch, given):
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(
        pytest.UsageError, match=rf"{VARIABLE} \(environment\): must be a number above 0, got '{given}'"
    ):
        scaled(1)
