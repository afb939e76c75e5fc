"""A stream as its client records it, while one of its processes dies or freezes: each index once, unchanged text.

Real processes with the oracle engine, at each special index. `test_determinism.py` has deaths on the demo model.
"""

import pytest

from tests.support.cluster_process import HANDED_OVER
from tests.support.load import struck
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow
BLOCK = 16
PROMPT = list(range(40, 50))
EDGE = BLOCK - len(PROMPT)  # the token that fills the first block
SETS = (HANDED_OVER, "decode.replicas=2", "ledger.lease_s=6", "ledger.heartbeat_s=0.5", "router.queue.max_wait_s=60")


@pytest.fixture(scope="module")
def oracle(module_home):
    with module_home.cluster("configs/no-ray.yaml", "model.path=oracle", *SETS) as running:
        yield running


def whole(cluster):
    return len(cluster.loads()) == 3 and cluster.all_free()


def recorded(cluster, options, after, victim, how):
    """Strike `victim` after token number `after`. Return the answer and the indices of its tokens as they came."""
    with cluster.client(max_retries=20) as client:
        for _ in range(10):
            stream = client.stream(PROMPT, **options)
            if found := struck(cluster, stream, victim, after + 1, freeze=how == "freeze"):
                deltas, answer = found
                return answer, [delta.start + n for delta in deltas for n in range(len(delta.tokens))]
    raise AssertionError("every stream had ended before it could be struck")


def holds(cluster, options, after, victim, how):
    eventually(lambda: whole(cluster), within_s=60)
    with cluster.client() as client:
        expected = client.generate(PROMPT, **options)
    answer, indices = recorded(cluster, options, after, victim, how)
    assert indices == list(range(len(expected.tokens)))
    for part in ("tokens", "text", "finish_reason"):
        assert getattr(answer, part) == getattr(expected, part)
    eventually(lambda: whole(cluster), within_s=60)


LAST = 799


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("after", "victim", "how"),
    [
        *((after, "decode", "kill") for after in (0, 1, 2, EDGE, LAST)),
        (20, "prefill-0", "kill"),
        (20, "router", "kill"),
        (20, "decode", "freeze"),
    ],
)
def test_of_the_oracle(oracle, after, victim, how):
    holds(oracle, {"max_tokens": LAST + 1, "temperature": 0, "ignore_eos": True}, after, victim, how)
