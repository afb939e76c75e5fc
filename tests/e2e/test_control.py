"""Operators, or the autoscaler, change a cluster under load, and no request fails.

After the operators' changes all processes' histories are checked.
"""

import random

import pytest

from baton.core import Role
from tests.support.load import Load, draw_jobs
from tests.support.time_factor import scaled
from tests.support.waiting import eventually
from tools.history_check import check

pytestmark = [pytest.mark.slow, pytest.mark.sample(2, of="control of a running cluster")]
QUICK = ("ledger.heartbeat_s=0.2",)
SETS = ("model.path=oracle", "model.max_model_len=512", "router.queue.max_wait_s=60", "prefill.replicas=2", *QUICK)
SERVED = {"whole", "left"}
WITHIN_S = f"{scaled(90):g}"


@pytest.fixture(scope="module")
def cluster(module_home, tmp_path_factory):
    folder = tmp_path_factory.mktemp("history")
    with module_home.cluster("configs/no-ray.yaml", *SETS, f"history={folder}") as running:
        yield running
        eventually(lambda: running.nothing_is_held(3))
    assert [str(violation) for violation in check([folder]).violations] == []


@pytest.fixture
def load(cluster):
    with Load(cluster, draw_jobs(random.Random(7)), 7) as running:
        running.settle()
        yield running
        running.settle(3)


def roles(cluster):
    with cluster.client() as client:
        return {worker.info.ref.worker_id: worker.info.role.value for worker in client.cluster().workers}


def operate(cluster, *what):
    cluster.home.baton(*what, "--name", cluster.name, "--wait", WITHIN_S, check=True)


def workers(cluster):
    return {name: one for name, one in cluster.processes().items() if name not in {"router", "redis"}}


def test_pools_change_their_sizes(cluster, load):
    before = workers(cluster)
    operate(cluster, "scale", "prefill=1", "decode=2")
    assert sorted(roles(cluster).values()) == ["decode", "decode", "prefill"]
    assert workers(cluster) == before, "one was turned, and no process ended"
    operate(cluster, "scale", "prefill=1", "decode=1")
    eventually(lambda: len(workers(cluster)) == 2)
    operate(cluster, "scale", "prefill=2", "decode=1")
    assert sorted(roles(cluster).values()) == ["decode", "prefill", "prefill"]
    load.settle()
    assert set(load.outcomes) <= SERVED


def test_all_are_replaced_one_by_one(cluster, load):
    before = workers(cluster)
    operate(cluster, "restart")
    eventually(lambda: len(workers(cluster)) == len(before))
    assert not set(before.values()) & set(workers(cluster).values())
    load.settle()
    assert set(load.outcomes) <= SERVED


def test_a_host_that_goes_away_drains_what_it_has(cluster, load):
    before = workers(cluster)
    file = cluster.home.path / cluster.name / "cluster.yaml"
    said = cluster.home.baton("drain", "--here", "-c", str(file), "--wait", WITHIN_S, check=True)
    assert "done" in said.stdout
    eventually(lambda: not any(identity.process() for identity in before.values()), within_s=30)
    eventually(lambda: sorted(roles(cluster).values()) == ["decode", "prefill", "prefill"], within_s=60)
    load.settle()
    assert set(load.outcomes) <= SERVED


# --- the autoscaler: more load than one decode worker can serve, then none

# Decode workers have too few blocks for all clients, so some wait.
SCALED = """
    model.path=oracle model.max_model_len=512 router.queue.max_wait_s=60 decode.kv_memory=96KiB
    prefill.replicas=2 prefill.autoscale.max=2 decode.autoscale.max=2
    slo.ttft_ms=5 scaling.up_after_s=1 scaling.settle_s=1 scaling.down_after_s=2
""".split()


def sizes(cluster):
    """Return the planned and the actual sizes."""
    with cluster.client() as client:
        found = client.cluster()
    roles, plan = [worker.info.role for worker in found.workers], found.control.plan
    return (plan.prefill, plan.decode), (roles.count(Role.PREFILL), roles.count(Role.DECODE))


def test_pools_follow_the_load_and_say_why(home):
    """Decode workers lack blocks, so a second one starts. Without load each pool shrinks to one."""
    with home.cluster("configs/no-ray.yaml", *SCALED) as cluster:
        with Load(cluster, draw_jobs(random.Random(3)), 3, clients=6, pause_s=0) as load:
            eventually(lambda: sizes(cluster)[1][1] == 2, within_s=45, every_s=0.3)
            load.settle(3)
        assert set(load.outcomes) <= SERVED
        control = cluster.status()["control"]
        said = [one["text"] for one in control["decisions"] if one["kind"] == "plan"]
        assert any("prefill to decode (1 to 2): " in text or "decode 1 to 2: " in text for text in said), said
        assert "decode" in control["outlook"]
        eventually(lambda: sizes(cluster) == ((1, 1), (1, 1)), within_s=60, every_s=0.3)
        shown = home.baton("status", "--name", cluster.name, check=True).stdout
        assert "autoscaler: prefill 1: " in shown
        reasons = [one["text"] for one in cluster.status()["control"]["decisions"]]  # the command shows the latest
        assert any("spare workers for 2 s" in text for text in reasons), reasons
