"""Deterministic requests of the demo model in bfloat16, on workers whose ordinary batch gives other bits with load."""

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[2]
REPEATS = int(os.environ.get("BATON_DETERMINISM_REPEATS", "2"))
SETS = (
    "model.path=models/demo",
    "model.dtype=bfloat16",
    "decode.replicas=2",
    "decode.attention_splits=load_bf16",
    "router.local_prefill=never",
)
PROMPT = "The days of the week are known to all. " * 16  # a context that load cuts into more or fewer splits
ASKED: dict[str, Any] = {"max_tokens": 80, "ignore_eos": True, "logprobs": 1, "seed": 11}
KINDS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8}}


@pytest.fixture(scope="module")
def cluster(module_home):
    with module_home.cluster("configs/no-ray.yaml", *SETS) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster):
    with cluster.client(timeout=120.0) as found:
        yield found


@pytest.fixture(scope="module")
def alone(client):
    """What a request gets when nobody else is there, in each kind."""
    answers = {kind: client.generate(PROMPT, deterministic=True, **ASKED, **how) for kind, how in KINDS.items()}
    return {kind: bits(answer) for kind, answer in answers.items()}


def bits(answer):
    """All that is promised to be equal; of floats their exact values."""
    logprobs = [(each.logprob.hex(), [(top, value.hex()) for top, value in each.top]) for each in answer.logprobs]
    return list(answer.tokens), logprobs, answer.usage.audit_digest, answer.system_fingerprint


def others(client, pool, count, rng):
    """So many ordinary requests of other lengths, under way."""
    asked = [("word " * rng.randint(1, 60), rng.randint(20, 90)) for _ in range(count)]
    how = {"ignore_eos": True, "temperature": 1.0, "seed": 1}
    return [pool.submit(client.generate, text, max_tokens=tokens, **how) for text, tokens in asked]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 3, 7, 31])
def test_the_same_bits_whatever_else_runs(client, alone, kind, count):
    rng = random.Random(count)
    with ThreadPoolExecutor(40) as pool:
        for _ in range(REPEATS):
            early = others(client, pool, count // 2, rng)
            asked = pool.submit(client.generate, PROMPT, deterministic=True, **ASKED, **KINDS[kind])
            late = others(client, pool, count - count // 2, rng)
            assert bits(asked.result()) == alone[kind]
            assert all(len(each.result().tokens) for each in early + late)


def test_many_of_them_side_by_side(client, alone):
    kinds = [*KINDS] * 6
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(client.generate, PROMPT, deterministic=True, **ASKED, **KINDS[kind]) for kind in kinds]
        assert [bits(each.result()) for each in asked] == [alone[kind] for kind in kinds]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_after_the_death_of_the_decode_worker(cluster, client, kind):
    asked = {**ASKED, **KINDS[kind], "max_tokens": 400, "deterministic": True}
    undisturbed = bits(client.generate(PROMPT, **asked))
    eventually(lambda: all(worker.state == "connected" for worker in client.cluster().workers), within_s=30)
    with client.stream(PROMPT, **asked) as stream:
        while len(stream.tokens) < 40:
            next(stream)
        busy = eventually(lambda: [name for name, load in cluster.loads().items() if load.running and "decode" in name])
        os.kill(cluster.pid(busy[0]), signal.SIGKILL)
        answer = stream.collect()
    assert bits(answer) == undisturbed
    assert answer.placement.attempts == 2


def test_control_without_the_flag_some_prompt_differs_with_load(client):
    """Else the fast path does not vary, and the tests above show nothing."""
    rng, words = random.Random(3), "the river runs to a wide sea and cities grow on it".split()
    prompts = [" ".join(rng.choices(words, k=160)) for _ in range(12)]

    def ask(prompt):
        return bits(client.generate(prompt, **ASKED, temperature=0.8))[:2]

    quiet = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(32) as pool:
        around = others(client, pool, 20, rng)
        loaded = list(pool.map(ask, prompts))
        assert all(len(each.result().tokens) for each in around)
    assert quiet != loaded
