"""A stream as its client records it, while what carries it dies or stands still: each index once, undisturbed text.

Real processes: the oracle engine at each index that is special, the demo model in fp32, greedy and with a seed.
"""

import os
import signal
from contextlib import contextmanager, suppress

import pytest

from tests.support.cluster_process import HANDED_OVER
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
BLOCK = 16
PROMPT = list(range(40, 50))
EDGE = BLOCK - len(PROMPT)  # the token that fills the first block
SETS = (HANDED_OVER, "decode.replicas=2", "ledger.lease_s=3", "ledger.heartbeat_s=0.5", "router.queue.max_wait_s=60")


@pytest.fixture(scope="module")
def oracle(module_home):
    with module_home.cluster("configs/no-ray.yaml", "model.path=oracle", *SETS) as running:
        yield running


@pytest.fixture(scope="module")
def demo(module_home):
    with module_home.cluster("configs/no-ray.yaml", *SETS, name="recorded") as running:
        yield running


def whole(cluster):
    """Whether all workers are there and nothing is held."""
    return len(cluster.loads()) == 3 and cluster.all_free()


@contextmanager
def struck(pid, how):
    """Kill the process, or freeze it until the end of the block. A frozen one may be replaced, and gone, by then."""
    os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    try:
        yield
    finally:
        if how == "freeze":
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def recorded(cluster, options, after, victim, how):
    """The answer, and the indices of its tokens as they came; `victim` is struck after token number `after` came."""
    indices: list[int] = []

    def read(stream, most):
        while len(indices) < most:
            delta = next(stream)
            indices.extend(range(delta.start, delta.start + len(delta.tokens)))

    def follow(stream):
        with stream:
            read(stream, 1)
            name = cluster.busy("decode") if victim == "decode" else victim
            if not name:
                return None  # it has ended already: the machine is slow
            read(stream, after + 1)
            pid = cluster.pid(name)
            with struck(pid, how):
                read(stream, options["max_tokens"])
                answer = stream.collect()
        if how == "freeze" and answer.placement.attempts == 1:
            return None  # all of it was under way already: nobody has missed the worker
        cluster.wait_replaced(name, pid)
        return answer, indices

    with cluster.client(max_retries=20) as client:
        for _ in range(10):
            indices.clear()
            if (found := follow(client.stream(PROMPT, **options))) is not None:
                return found
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


@pytest.mark.parametrize(
    ("after", "victim", "how"),
    [
        (0, "decode", "kill"),
        (1, "decode", "kill"),
        (2, "decode", "kill"),
        (EDGE, "decode", "kill"),
        (LAST, "decode", "kill"),
        (20, "prefill-0", "kill"),
        (20, "router", "kill"),
        (20, "decode", "freeze"),
    ],
)
def test_of_the_oracle(oracle, after, victim, how):
    holds(oracle, {"max_tokens": LAST + 1, "temperature": 0, "ignore_eos": True}, after, victim, how)


@pytest.mark.parametrize(
    ("sampling", "victim"),
    [
        ({"temperature": 0}, "decode"),
        ({"temperature": 0.8, "seed": 7}, "decode"),
        ({"temperature": 0.8, "seed": 7}, "router"),
    ],
    ids=["greedy", "seeded", "router"],
)
def test_of_the_demo_model(demo, sampling, victim):
    holds(demo, {"max_tokens": 400, "ignore_eos": True, **sampling}, 5, victim, "kill")
