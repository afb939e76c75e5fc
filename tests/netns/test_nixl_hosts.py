"""Two hosts: KV over NIXL, and a source that is killed."""

import signal
from importlib.util import find_spec

import pytest

from tests.netns.hosts import Network
from tests.netns.support import Plain, census, handed_over, long_prompt

pytestmark = [
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed (the extra nixl)"),
]


def test_kv_is_read_over_the_link_and_a_dead_source_is_replaced(tmp_path):
    with Network("a", "b") as network:
        a, b = network["a"], network["b"]
        cluster = Plain(a, tmp_path, ("transport: gloo", "transport: nixl"))
        started = [cluster.start_worker(a, "prefill-0"), cluster.start_worker(b, "decode-0")]
        for process in (cluster.router, *started):
            process.ready()
        cluster.wait_connected("prefill-0", "decode-0")
        handed_over(cluster, long_prompt(0))  # builds the channel
        before = a.sent()
        _, done = handed_over(cluster, long_prompt(1))
        assert done.placement.transport == "nixl"
        assert 1e6 < done.placement.kv_bytes < a.sent() - before < 1.5 * done.placement.kv_bytes
        cluster.workers["prefill-0"].end(signal.SIGKILL)
        cluster.start_worker(a, "prefill-0").ready()
        cluster.wait_connected("prefill-0", "decode-0")
        _, again = handed_over(cluster, [*long_prompt(1)[:-1], 1])
        assert again.placement.transport == "nixl"
        with cluster.client() as client:
            for prompt, answer in ((long_prompt(1), done), ([*long_prompt(1)[:-1], 1], again)):
                right = client.generate(prompt, max_tokens=4, temperature=0, ignore_eos=True, cache_scope="again")
                assert right.choices[0].tokens == answer.choices[0].tokens
        census(cluster.admin)
