"""Files of configs/ that no other test here starts as they are: one question, and who had a part in the answer."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.cluster_process import HANDED_OVER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
two_by_two_alone = pytest.mark.xdist_group("two-by-two")


@pytest.fixture(scope="module")
def two_by_two(module_home):
    with module_home.cluster("configs/local-2x2.yaml", HANDED_OVER) as running:
        yield running


def answers(cluster, workers):
    with cluster.client() as client:
        answer = client.generate("The color of dog", max_tokens=8, temperature=0)
        assert (answer.text, answer.finish_reason.value) == (" can vary widely", "eos")
        loads = {worker.info.ref.worker_id: worker.load for worker in client.cluster().workers}
        assert len(loads) == workers
        assert sum(load.prefill_tokens for name, load in loads.items() if name.startswith("prefill")) > 0
        assert sum(load.decode_steps for name, load in loads.items() if name.startswith("decode")) > 0


def test_two_tensor_parallel_workers_start_and_answer(home):
    with home.cluster("configs/disaggregated-tp.yaml", HANDED_OVER) as cluster:
        answers(cluster, workers=2)


@two_by_two_alone
def test_two_by_two_starts_and_answers(two_by_two):
    answers(two_by_two, workers=4)


@two_by_two_alone
def test_two_by_two_uses_all_workers(two_by_two):
    with two_by_two.client() as client:
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda n: client.generate(f"Count from {n}", max_tokens=20, seed=n), range(32)))
        assert {a.placement.prefill_worker for a in found} == {"prefill-0", "prefill-1"}
        assert {a.placement.decode_worker for a in found} - {""} == {"decode-0", "decode-1"}
