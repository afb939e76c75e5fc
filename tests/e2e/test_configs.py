"""The file of configs/ that no other test here starts as it is."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.cluster_process import HANDED_OVER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_two_by_two_answers_and_uses_all_workers(home):
    with home.cluster("configs/local-2x2.yaml", HANDED_OVER) as cluster, cluster.client() as client:
        answer = client.generate("The color of dog", max_tokens=8, temperature=0)
        assert (answer.text, answer.finish_reason.value) == (" can vary widely", "eos")
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda n: client.generate(f"Count from {n}", max_tokens=20, seed=n), range(32)))
        assert {a.placement.prefill_worker for a in found} == {"prefill-0", "prefill-1"}
        assert {a.placement.decode_worker for a in found} - {""} == {"decode-0", "decode-1"}
        loads = cluster.loads()
        assert len(loads) == 4
        assert all(load.prefill_tokens for name, load in loads.items() if name.startswith("prefill"))
        assert all(load.decode_steps for name, load in loads.items() if name.startswith("decode"))
