"""benchmarks/choose.py as a user runs it, with few workers."""

import json
import subprocess
import sys

import pytest

from benchmarks.lib.protocol import ROOT
from router.policy import POLICIES


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_quick_run_ends_with_all_figures() -> None:
    command = [sys.executable, "benchmarks/choose.py", "--quick", "--workers", "100", "--blocks", "3000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["benchmark"] == "choose"
    figures = last["ratios"]
    assert min(figures.values()) > 0
    assert {name.split(",")[0] for name in figures} == {*POLICIES, "naming", "report"}
