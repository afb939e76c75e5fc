"""Turns of a conversation: what the decode worker has does not move again, and goes back to who has lost it."""

import os
import signal

import pytest

from tests.support.cluster_process import HANDED_OVER
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

FIRST = " ".join(f"word{number}" for number in range(400))


def connected(cluster, worker):
    with cluster.client() as client:
        return any(w.info.ref.worker_id == worker and w.state == "connected" for w in client.cluster().workers)


def settled(cluster):
    """All blocks are free or cached again."""
    return eventually(lambda: all(load.blocks.reserved + load.blocks.owned == 0 for load in cluster.loads().values()))


def test_a_second_turn_moves_little_and_a_new_prefill_worker_fetches(home):
    sets = (HANDED_OVER, "ray.address=none", "prefill.threads=1", "decode.threads=1", "transfer.verify=kv")
    with home.cluster("configs/local.yaml", *sets) as cluster, cluster.client() as client:
        first = client.generate(FIRST, max_tokens=24, temperature=0, ignore_eos=True)
        assert first.placement.kv_bytes > 2_000_000
        second = FIRST + first.text + " and then"
        expected = client.generate(second, max_tokens=24, temperature=0, ignore_eos=True)
        assert expected.placement.kv_bytes < 100_000  # the rest lies on the decode worker since the first turn
        assert settled(cluster)

        pid = cluster.pid("prefill-0")
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: cluster.pid("prefill-0") != pid, within_s=30)
        eventually(lambda: connected(cluster, "prefill-0"), within_s=30)  # until then the decode worker does it alone
        client.generate("something else " * 20, max_tokens=2)  # so that it knows what computing costs
        again = client.generate(second, max_tokens=24, temperature=0, ignore_eos=True)
        assert again.text == expected.text
        fetched = cluster.loads()["prefill-0"].fetched_tokens
        assert fetched == again.usage.cached_tokens > 1000
        assert again.placement.kv_bytes < 100_000
        assert settled(cluster)
        peers = {load.channels[0].peer for load in cluster.loads().values()}
        assert peers == {"prefill-0", "decode-0"}


@pytest.mark.parametrize("transport", ["gloo", "grpc"])
def test_any_transport_gives_the_same_answer(home, transport):
    sets = (HANDED_OVER, "ray.address=none", "prefill.threads=1", "decode.threads=1", f"transfer.transport={transport}")
    with home.cluster("configs/local.yaml", *sets) as cluster, cluster.client() as client:
        answers = [client.generate(FIRST, max_tokens=8, temperature=0) for _ in range(2)]
        assert [answer.placement.transport for answer in answers] == [transport] * 2
        assert len({answer.text for answer in answers}) == 1
        assert settled(cluster)


def test_block_sizes_may_differ(home):
    sets = (
        HANDED_OVER,
        "ray.address=none",
        "prefill.threads=1",
        "decode.threads=1",
        "prefill.block_size=8",
        "decode.block_size=32",
    )
    with home.cluster("configs/local.yaml", *sets) as cluster, cluster.client() as client:
        first = client.generate(FIRST, max_tokens=24, temperature=0, ignore_eos=True)
        again = client.generate(FIRST, max_tokens=24, temperature=0, ignore_eos=True)
        assert first.text == again.text
        assert again.placement.kv_bytes < first.placement.kv_bytes / 10
        assert settled(cluster)
