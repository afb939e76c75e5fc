"""The cluster of a benchmark ends with it."""

import signal
import subprocess
import sys

import psutil
import pytest

from benchmarks.lib.protocol import ROOT
from tests.support.time_factor import scaled

PROGRAM = """
from benchmarks.lib.cluster import cluster
with cluster("killed") as state:
    print(*(process.pid for process in state.processes.values()), flush=True)
    input()
"""


@pytest.mark.slow
def test_a_cluster_ends_with_a_killed_benchmark():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT, stdin=-1, stdout=-1, text=True) as program:
        assert program.stdout is not None
        started = [psutil.Process(int(pid)) for pid in program.stdout.readline().split()]
        program.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(started, timeout=scaled(60))
        assert started
        assert not alive
