"""`--sample` of tests/conftest.py: which cases of a matrix are left out."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine.kernels.cpu.compiler import LEVELS, Machine
from tests.support import sampling
from tests.support.sampling import VARIABLE, drawn_by, half, left_out

ROOT = Path(__file__).parents[2]


class Case:
    """A collected test, as far as the draw looks at it."""

    def __init__(self, nodeid: str, *mark, **named) -> None:
        self.nodeid, self._mark = nodeid, pytest.mark.sample(*mark, **named).mark if mark else None

    def get_closest_marker(self, name: str):
        return self._mark if name == "sample" else None


CASES: list[Any] = [
    *(Case(f"test_matrix[{number}]", 2) for number in range(10)),
    *(Case(f"test_of_both[{number}]", 1, of="both") for number in range(2)),
    Case("test_other", 1, of="both"),
    Case("test_few[1]", 2),
    Case("test_plain"),
]


def kept(drawn: str) -> list[str]:
    out = left_out(CASES, drawn)
    return [case.nodeid for case in CASES if case not in out]


def test_each_matrix_and_each_name_keeps_its_number_of_cases():
    for drawn in map(str, range(20)):
        count = Counter(nodeid.partition("[")[0] for nodeid in kept(drawn))
        assert (count["test_matrix"], count["test_of_both"] + count["test_other"]) == (2, 1)
        assert (count["test_few"], count["test_plain"]) == (1, 1)


def test_the_draw_is_repeatable_and_another_one_has_other_cases():
    assert kept("a") == kept("a")
    assert {nodeid for number in range(40) for nodeid in kept(str(number))} == {case.nodeid for case in CASES}


def test_a_half_of_the_files_is_drawn_and_another_draw_has_others():
    files = [f"test_{number}.py" for number in range(9)]
    assert half(files, "a") == half(files[::-1], "a")
    assert len(half(files, "a")) == 5
    assert {file for number in range(20) for file in half(files, str(number))} == set(files)


@pytest.mark.parametrize(("answer", "status", "ran"), [("echo 7; echo a b", 0, "7: a b"), ("exit 3", 2, "")])
def test_without_kernels_runs_a_half_by_the_draw_that_it_hands_to_pytest_or_nothing(tmp_path, answer, status, ran):
    """`python` is replaced: the draw has the output or the status of `answer`, pytest prints what it would run."""
    pytest_ = 'echo "ran $BATON_TEST_SAMPLE: ${*: -2}"'
    (tmp_path / "python").write_text(f"#!/bin/bash\n[[ $2 == pytest ]] && {pytest_} && exit\n{answer}\n")
    (tmp_path / "python").chmod(0o700)
    command = ["make", "-s", "-o", ".venv/.fresh", "without-kernels", "HALF=1", f"BIN={tmp_path}"]
    environment = {name: value for name, value in os.environ.items() if name not in {VARIABLE, "MAKEFLAGS"}}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip().removeprefix("ran ")) == (status, ran), done.stderr


def test_the_printed_half_is_that_of_the_variable_which_is_printed():
    command = [sys.executable, "-m", "tests.support.sampling", *"abcd"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, VARIABLE: "x y"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["x y", " ".join(half("abcd", "x y"))]
    assert f"{VARIABLE}='x y'" in done.stderr


def test_the_commit_decides_in_ci_and_the_seed_elsewhere(monkeypatch):
    monkeypatch.setenv(VARIABLE, "restored at the end")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.delenv("CI", raising=False)
    assert drawn_by(7) == "7"
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("CI", "1")
    assert drawn_by(7) == drawn_by(8) != "8"


def test_of_the_levels_the_best_one_here_and_a_drawn_one_are_kept(monkeypatch):
    def kept_levels(drawn: str) -> set[str]:
        sampling.other_levels.cache_clear()
        left = left_out(cases, drawn)
        return {case.nodeid for case in cases if case not in left}

    cases: list[Any] = [Case(level) for level in (*LEVELS, "native")]
    for case in cases:
        case.callspec = SimpleNamespace(params={"level": case.nodeid})
    needed = frozenset(LEVELS["avx512"]) | set(LEVELS["avx-vnni"])
    monkeypatch.setattr(sampling, "machine", lambda: Machine("x", needed))
    found = [kept_levels(str(drawn)) - {"native"} for drawn in range(20)]
    assert all(len(levels) == 2 and "avx512" in levels for levels in found)
    assert set.union(*found) == {"avx512", "avx-vnni", "avx2"}
    sampling.other_levels.cache_clear()
