"""The autoscaler on a cluster of plain processes: more load than one decode worker can serve, then none."""

import random

import pytest

from baton.core import Role
from tests.support.load import Load, draw_jobs
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow
# Decode workers have too few blocks for all clients, so some wait.
SETS = """
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
    with home.cluster("configs/no-ray.yaml", *SETS) as cluster:
        with Load(cluster, draw_jobs(random.Random(3)), 3) as load:
            eventually(lambda: sizes(cluster)[1][1] == 2, within_s=45, every_s=0.3)
            load.settle(3)
        assert set(load.outcomes) <= {"whole", "left"}
        control = cluster.status()["control"]
        said = [one["text"] for one in control["decisions"] if one["kind"] == "plan"]
        assert any("prefill to decode (1 to 2): " in text or "decode 1 to 2: " in text for text in said), said
        assert "decode" in control["outlook"]
        eventually(lambda: sizes(cluster) == ((1, 1), (1, 1)), within_s=60, every_s=0.3)
        shown = home.baton("status", "--name", cluster.name, check=True).stdout
        assert "autoscaler: prefill 1: " in shown
        assert "spare workers for 2 s" in shown
