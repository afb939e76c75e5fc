"""The pipe between a program and a measured process, with real processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.lib.protocol import Child, ChildFailed, Setup
from tests.support.waiting import eventually

PROGRAM = """
import os, time
from benchmarks.lib.protocol import serve

def load(setup):
    os.write(1, b"a library that prints too early\\n")
    return {"threads": setup.threads, "omp": os.environ.get("OMP_NUM_THREADS")}, {
        "add": lambda a, b: (print("noise"), {"sum": a + b})[1],
        "fail": lambda: {}["missing"],
        "leave": lambda: (print("bye bye", flush=True), os._exit(3)),
        "hang": lambda: time.sleep(60),
    }

if __name__ == "__main__":
    serve(load)
"""
SETUP = Setup(model="m", dtype="bf16", threads=2, kv_tokens=1, cache="c")


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with Child("it", [sys.executable, str(program)], SETUP, tmp_path / "it.log") as child:
        child.start(30)
        yield child


def test_it_gets_its_setup_and_answers_also_after_an_error(child: Child) -> None:
    assert child.about == {"threads": 2, "omp": "2"}
    with pytest.raises(ChildFailed, match="it: KeyError: 'missing'"):
        child.ask("fail", 30)
    assert child.ask("add", 30, a=2, b=3) == {"sum": 5}
    eventually(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED, "stopped while it is not asked")
    assert child.ask("add", 30, a=1, b=1) == {"sum": 2}


def test_an_end_is_reported_with_its_last_words(child: Child) -> None:
    with pytest.raises(ChildFailed, match=r"it: ended.*bye bye"):
        child.ask("leave", 30)
    assert not child.alive


def test_a_slow_one_is_ended_so_that_its_answer_is_never_mistaken(child: Child) -> None:
    with pytest.raises(ChildFailed, match="no answer within"):
        child.ask("hang", 0.05)
    assert not child.alive
    assert not psutil.pid_exists(child.pid)
