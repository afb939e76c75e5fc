"""A cluster of plain processes on the oracle engine: every stream is exactly right under any concurrent load."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import pytest

from baton.core import Constraint, Kind, Sampling, SequenceSpec
from baton.engine.oracle import OracleBackend
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("oracle")]

CONSTRAINTS: list[dict[str, Any]] = [
    {"regex": "([a-z]{2,9} )+[0-9]{4}"},
    {"choices": ["yes", "yesterday", "no"]},
    {"json_schema": '{"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}'},
]


def draw(rng):
    prompt = tuple(rng.randrange(256) for _ in range(rng.randrange(1, 300)))
    options = {"max_tokens": rng.randrange(1, 120), "seed": rng.randrange(2**63), "ignore_eos": rng.random() < 0.5}
    options |= {
        "temperature": rng.choice([0.0, 0.7, 1.3]),
        "top_k": rng.choice([0, 5]),
        "top_p": rng.choice([1.0, 0.8]),
    }
    options |= {"presence_penalty": rng.choice([0.0, 1.0]), "repetition_penalty": rng.choice([1.0, 1.2])}
    if rng.random() < 0.3:
        options |= rng.choice(CONSTRAINTS) | {"ignore_eos": False}
    return prompt, options


def spec_of(prompt, options):
    sampling = dict(options)
    constraint = None
    for kind in get_args(Kind):
        if (asked := sampling.pop(kind, None)) is not None:
            constraint = Constraint(kind, (asked,) if isinstance(asked, str) else tuple(asked))
    return SequenceSpec(prompt, Sampling(**sampling), constraint=constraint)


def test_many_mixed_requests_each_get_their_own_stream(oracle_cluster, seed):
    """32 concurrent requests in pools so small that decode preempts. Each equals the oracle's answer."""
    rng = random.Random(seed)
    jobs = [draw(rng) for _ in range(32)]
    with oracle_cluster.client() as client, ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda job: client.generate(list(job[0]), **job[1]), jobs))
    oracle = OracleBackend()
    for (prompt, options), answer in zip(jobs, answers, strict=True):
        assert list(answer.tokens) == oracle.expected(spec_of(prompt, options)), (options, answer)
    eventually(oracle_cluster.all_free)


def test_roles_are_kept_apart(oracle_cluster):
    with oracle_cluster.client() as client:
        answer = client.generate("hello there", max_tokens=20, temperature=0, ignore_eos=True)
    assert answer.placement.decode_worker == "decode-0"
    assert answer.placement.kv_bytes > 0
    loads = oracle_cluster.loads()
    assert loads["decode-0"].prefill_tokens == 0
    assert loads["prefill-0"].decode_steps == 0
    assert loads["prefill-0"].prefill_tokens > 0
    assert loads["decode-0"].decode_steps > 0


def test_a_request_that_ends_with_its_first_token_is_not_handed_over(oracle_cluster):
    options = {"max_tokens": 1, "temperature": 0, "ignore_eos": True, "cache_scope": "short"}
    with oracle_cluster.client() as client:
        answers = [client.generate("z" * 40, **options) for _ in range(2)]
    assert [answer.usage.cached_tokens for answer in answers] == [0, 32]
    for answer in answers:
        assert (len(answer.tokens), answer.placement.decode_worker, answer.placement.kv_bytes) == (1, "", 0)
    eventually(oracle_cluster.all_free)


def test_a_prompt_is_computed_once_per_cache_scope(oracle_cluster):
    """216 tokens are 13 blocks of 16 and 8 more tokens."""
    with oracle_cluster.client() as client:
        before = oracle_cluster.loads()["prefill-0"]
        options = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "priority": 2}
        answers = [client.generate("Once upon a time, " * 12, **options, cache_scope=scope) for scope in "aabab"]
        after = eventually(oracle_cluster.all_free)
    assert [answer.usage.cached_tokens for answer in answers] == [0, 208, 0, 208, 208]
    assert len({answer.tokens for answer in answers}) == 1
    assert after["prefill-0"].cached_tokens - before.cached_tokens == 3 * 208
    assert after["prefill-0"].prefill_tokens - before.prefill_tokens == 5 * 216 - 3 * 208
    assert after["prefill-0"].blocks.cached > 0
