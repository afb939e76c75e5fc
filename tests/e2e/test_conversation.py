"""Turns of a conversation: KV that the decode worker has is not sent again, and a new prefill worker fetches it."""

import pytest

from tests.support.cluster_process import HANDED_OVER
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

FIRST = " ".join(f"word{number}" for number in range(400))


def settled(cluster):
    return eventually(lambda: all(load.blocks.reserved + load.blocks.owned == 0 for load in cluster.loads().values()))


def test_a_second_turn_moves_little_and_a_new_prefill_worker_fetches(home):
    sets = (HANDED_OVER, "ray.address=none", "prefill.threads=1", "decode.threads=1", "transfer.verify=kv")
    with home.cluster("configs/local.yaml", *sets) as cluster, cluster.client() as client:
        first = client.generate(FIRST, max_tokens=24, temperature=0, ignore_eos=True)
        assert first.placement.kv_bytes > 2_000_000
        second = FIRST + first.text + " and then"
        expected = client.generate(second, max_tokens=24, temperature=0, ignore_eos=True)
        assert expected.placement.kv_bytes < 100_000  # the decode worker has the rest since the first turn
        assert settled(cluster)

        cluster.wait_replaced("prefill-0", cluster.kill("prefill-0"))
        eventually(lambda: "prefill-0" in cluster.connected(), within_s=30)  # until then decode-0 works alone
        client.generate("something else " * 20, max_tokens=2)  # teaches prefill-0 the cost of computing
        again = client.generate(second, max_tokens=24, temperature=0, ignore_eos=True)
        assert again.text == expected.text
        fetched = cluster.loads()["prefill-0"].fetched_tokens
        assert fetched == again.usage.cached_tokens > 1000
        assert again.placement.kv_bytes < 100_000
        assert settled(cluster)
        peers = {load.channels[0].peer for load in cluster.loads().values()}
        assert peers == {"prefill-0", "decode-0"}
