"""The last resort of tests that fail between `baton up` and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.support.cluster_process import Home

ENDLESS = "import subprocess, sys, time\nprint(subprocess.Popen(sys.argv[1:]).pid, flush=True)\ntime.sleep(600)"


def test_what_a_test_left_running_is_killed_and_told(tmp_path):
    command = [sys.executable, "-c", ENDLESS, sys.executable, "-c", "import time\ntime.sleep(600)"]
    home = Home(tmp_path)
    with home.swept(within_s=0.0) as same:
        assert same.processes() == []
    sweep = home.swept(within_s=0.0)
    sweep.__enter__()
    env = os.environ | {"BATON_HOME": str(home.path)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert {found.pid for found in home.processes()} == {process.pid, child}
    with pytest.raises(AssertionError, match=r"the test left running: .*time\.sleep\(600\)"):
        sweep.__exit__(None, None, None)
    assert process.wait(timeout=10) == -signal.SIGKILL
    assert home.processes() == []


def test_processes_of_others_are_left_alone(tmp_path):
    env = os.environ | {"BATON_HOME": str(tmp_path / "other")}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=env, stdin=subprocess.PIPE) as process:
        with Home(tmp_path).swept():
            pass
        assert process.poll() is None
        process.communicate(b"\n")
    assert process.returncode == 0
