"""`baton profile --live` measures a running cluster, and `baton plan` uses the result. Benchmarks leave nothing."""

import json
import signal
import subprocess
import sys

import psutil
import pytest

from baton.planner.live_fit import FACTORS
from baton.planner.profile import load_profile
from tests.support.cluster_process import ROOT
from tests.support.time_factor import scaled

pytestmark = pytest.mark.slow
some = pytest.mark.sample(1, of="profiles of running clusters, and benchmarks that start one")
ORACLE = ("model.path=oracle", "model.max_model_len=640")


@some
def test_a_running_cluster_becomes_a_profile_that_a_plan_is_made_with(home, tmp_path):
    file = tmp_path / "here.json"
    with home.cluster("configs/no-ray.yaml", *ORACLE) as running:
        home.baton("profile", "--live", file, "--seconds", 5, check=True)
        info = running.status()["workers"][0]["info"]
    found = load_profile(str(file))
    (layout,) = found.layouts
    assert layout.kv_tokens == info["total_blocks"] * info["layout"]["block_size"]
    assert found.layers == info["layout"]["layers"]
    cost = layout.cost()
    assert 0 < cost.seconds(16, 136, 0, 0) <= cost.seconds(256, 256 * 257 // 2, 0, 0) < 1
    for rows in (1, 32):  # their order depends on the machine: this engine's cost of a row is less than the noise
        assert 0 < cost.seconds(0, 0, rows, rows * 40) < 1
    assert sum(layout.spread) / len(layout.spread) == pytest.approx(1.0, abs=0.01)
    assert 0 < found.overheads.admit_s < 1
    args = ("--rate", 2, "--prompt-tokens", 64, "--max-tokens", 8, "--requests", 60, "--gpus-at-most", 4, "--json")
    planned = json.loads(home.baton("plan", "--profile", file, *args, check=True).stdout)
    assert planned["best"]["gpus"] <= 2
    assert planned["best"]["met"]


@some
def test_workers_that_do_both_show_what_they_cost_each_other(home, tmp_path):
    file = tmp_path / "here.json"
    with home.cluster("configs/no-ray.yaml", *ORACLE, "mode=colocated", "decode.replicas=1") as running:
        assert len(running.status()["workers"]) == 2
        home.baton("profile", "--live", file, "--seconds", 5, check=True)
    (layout,) = load_profile(str(file)).layouts
    assert layout.host_workers == 2
    assert layout.beside_decode is not None
    for beside in (layout.beside_prompts, layout.beside_decode):
        assert len(beside.spread) == FACTORS  # their size depends on the machine: rows are short here
        assert sum(beside.spread) / FACTORS == pytest.approx(1.0, abs=0.01)


# --- benchmarks that start a cluster

PROGRAM = """
import sys
from benchmarks.lib.cluster import cluster

with cluster("ended") as state:
    print(*(process.pid for process in state.processes.values()), flush=True)
    sys.stdin.read()
"""


@some
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_benchmark_that_is_ended_leaves_nothing(sent, code):
    """SIGINT is not tested, because Python itself turns it into an exception."""
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as benchmark:
        assert benchmark.stdout is not None
        started = [psutil.Process(int(pid)) for pid in benchmark.stdout.readline().split()]
        assert len(started) > 2, "router and workers at least"
        benchmark.send_signal(sent)
        assert benchmark.wait(scaled(60)) == code
        _, alive = psutil.wait_procs(started, timeout=scaled(60))
    assert not alive
