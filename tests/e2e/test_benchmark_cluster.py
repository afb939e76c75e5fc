"""A benchmark that ends also ends the cluster that it started."""

import signal
import subprocess
import sys

import psutil
import pytest

from tests.support.cluster_process import ROOT
from tests.support.time_factor import scaled

pytestmark = pytest.mark.slow
PROGRAM = """
import sys
from benchmarks.lib.cluster import cluster

with cluster("ended") as state:
    print(*(process.pid for process in state.processes.values()), flush=True)
    sys.stdin.read()
"""


def test_a_benchmark_that_is_ended_leaves_nothing():
    """Only SIGTERM is tested, because Python itself turns SIGINT into an exception."""
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as benchmark:
        assert benchmark.stdout is not None
        started = [psutil.Process(int(pid)) for pid in benchmark.stdout.readline().split()]
        assert len(started) > 2, "router and workers at least"
        benchmark.terminate()
        assert benchmark.wait(scaled(60)) == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(started, timeout=0)
    assert not alive
