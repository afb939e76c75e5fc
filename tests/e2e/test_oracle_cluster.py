"""A cluster of plain processes on the oracle engine: every stream is exactly the right one, whatever runs beside it."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import grpc
import pytest

from baton.constraint import Constraint, Kind
from baton.core import Sampling, SequenceSpec
from baton.engine.oracle import OracleBackend
from baton.errors import InvalidRequest, Overloaded, UnknownModel
from baton.rpc.v1 import inference_pb2, inference_pb2_grpc
from tests.support.cluster_process import HANDED_OVER
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SMALL = (
    HANDED_OVER,
    "model.path=oracle",
    "model.max_model_len=512",
    "decode.kv_memory=96KiB",
    "prefill.kv_memory=96KiB",
)


@pytest.fixture(scope="module")
def cluster(module_home):
    sets = (*SMALL, "router.queue.max_wait_s=60", "determinism.verify=always")
    with module_home.cluster("configs/no-ray.yaml", *sets) as running:
        yield running


CONSTRAINTS: list[dict[str, Any]] = [
    {"regex": "([a-z]{2,9} )+[0-9]{4}"},
    {"choices": ["yes", "yesterday", "no"]},
    {"json_schema": '{"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}'},
]


def draw(rng):
    prompt = tuple(rng.randrange(256) for _ in range(rng.randrange(1, 300)))
    options = {
        "max_tokens": rng.randrange(1, 120),
        "temperature": rng.choice([0.0, 0.7, 1.3]),
        "top_k": rng.choice([0, 5]),
        "top_p": rng.choice([1.0, 0.8]),
        "seed": rng.randrange(2**63),
        "presence_penalty": rng.choice([0.0, 1.0]),
        "repetition_penalty": rng.choice([1.0, 1.2]),
        "ignore_eos": rng.random() < 0.5,
    }
    if rng.random() < 0.3:
        options |= rng.choice(CONSTRAINTS) | {"ignore_eos": False}
    return prompt, options


def spec_of(prompt, options):
    """What the oracle is asked to compute alone."""
    sampling = dict(options)
    constraint = None
    for kind in get_args(Kind):
        if (asked := sampling.pop(kind, None)) is not None:
            constraint = Constraint(kind, (asked,) if isinstance(asked, str) else tuple(asked))
    return SequenceSpec(prompt, Sampling(**sampling), constraint=constraint)


def free_again(cluster):
    """Nobody holds a block on either worker, and nothing runs."""
    loads = cluster.loads()
    return all(load.blocks.available == load.blocks.total and not load.running for load in loads.values()) and loads


def test_many_mixed_requests_each_get_their_own_stream(cluster, seed):
    """32 at once through pools so small that decode preempts; each equals what the oracle computes alone."""
    rng = random.Random(seed)
    jobs = [draw(rng) for _ in range(32)]
    with cluster.client() as client, ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda job: client.generate(list(job[0]), **job[1]), jobs))
    oracle = OracleBackend()
    for (prompt, options), answer in zip(jobs, answers, strict=True):
        assert list(answer.tokens) == oracle.expected(spec_of(prompt, options)), (options, answer)
    eventually(lambda: free_again(cluster))


def test_roles_are_kept_apart(cluster):
    with cluster.client() as client:
        answer = client.generate("hello there", max_tokens=20, temperature=0, ignore_eos=True)
    assert answer.placement.decode_worker == "decode-0"
    assert answer.placement.kv_bytes > 0
    loads = cluster.loads()
    assert loads["decode-0"].prefill_tokens == 0
    assert loads["prefill-0"].decode_steps == 0
    assert loads["prefill-0"].prefill_tokens > 0
    assert loads["decode-0"].decode_steps > 0


def test_a_prompt_is_computed_once_per_cache_scope(cluster):
    """216 tokens: 13 blocks of 16 and a rest."""
    with cluster.client() as client:
        before = cluster.loads()["prefill-0"]
        options = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "priority": 2}
        answers = [client.generate("Once upon a time, " * 12, **options, cache_scope=scope) for scope in "aabab"]
        after = eventually(lambda: free_again(cluster))
    assert [answer.usage.cached_tokens for answer in answers] == [0, 208, 0, 208, 208]
    assert len({answer.tokens for answer in answers}) == 1
    assert after["prefill-0"].cached_tokens - before.cached_tokens == 3 * 208
    assert after["prefill-0"].prefill_tokens - before.prefill_tokens == 5 * 216 - 3 * 208
    assert after["prefill-0"].blocks.cached > 0


def test_a_prompt_that_ends_with_its_first_token_says_what_was_cached(cluster):
    with cluster.client() as client:
        answers = [client.generate("z" * 40, max_tokens=1, temperature=0, cache_scope="short") for _ in range(2)]
    assert [answer.usage.cached_tokens for answer in answers] == [0, 32]


def test_the_stages_sum_to_the_whole(cluster):
    with cluster.client() as client:
        t = client.generate("hello", max_tokens=8, temperature=0, ignore_eos=True).timings
    total = t.queue_s + t.route_s + t.reserve_s + t.prefill_s + t.transfer_s + t.commit_s + t.decode_s
    assert total == pytest.approx(t.e2e_s, abs=1e-6)
    assert min(t.prefill_s, t.transfer_s, t.decode_s) > 0


def test_deterministic_requests_say_by_what_they_are_so(cluster):
    """Their tokens are those of the oracle, too, and equal ones have equal digests."""
    options = {"max_tokens": 50, "temperature": 0.8, "seed": 11, "ignore_eos": True, "logprobs": 1}
    with cluster.client() as client, ThreadPoolExecutor(8) as pool:
        asked = [{"deterministic": True}] * 6 + [{}] * 2
        answers = list(pool.map(lambda more: client.generate("The color of dog " * 9, **options, **more), asked))
    exact, plain = answers[:6], answers[6:]
    assert len({answer.tokens for answer in answers}) == 1
    assert len({answer.usage.audit_digest for answer in exact}) == 1
    assert len(exact[0].usage.audit_digest) == 64
    assert not any(answer.usage.audit_digest for answer in plain)
    (fingerprint,) = {answer.system_fingerprint for answer in answers}
    assert len(fingerprint) == 24
    loads = eventually(lambda: free_again(cluster))
    assert loads["decode-0"].verify_passes > 0


def test_a_request_that_ends_with_its_first_token_is_not_handed_over(cluster):
    with cluster.client() as client:
        answer = client.generate("hello", max_tokens=1, temperature=0, ignore_eos=True)
    assert (len(answer.tokens), answer.placement.decode_worker, answer.placement.kv_bytes) == (1, "", 0)
    eventually(lambda: free_again(cluster))


@pytest.mark.parametrize("tokens_before_leaving", [0, 1, 2, 5, 17])
def test_leaving_a_stream_gives_all_blocks_back(cluster, tokens_before_leaving):
    with cluster.client() as client:
        with client.stream("x" * 200, max_tokens=300, temperature=0, ignore_eos=True) as stream:
            for _ in range(tokens_before_leaving):
                next(stream)
        eventually(lambda: free_again(cluster), within_s=5)


def test_a_storm_of_requests_left_at_random_leaves_nothing(cluster, seed):
    rng = random.Random(seed)

    def leave(job):
        prompt, options, after = job
        with cluster.client() as client, client.stream(list(prompt), **options) as stream:
            for _, _ in zip(range(after), stream, strict=False):
                pass

    jobs = [(*draw(rng), rng.choice([0, 0, 1, 2, 3, 10, 40])) for _ in range(40)]
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(leave, jobs))
    eventually(lambda: free_again(cluster), within_s=20)


def test_cancel_by_id_ends_the_stream_and_frees_both_sides(cluster):
    with cluster.client() as client:
        stream = client.stream("y" * 100, max_tokens=400, temperature=0, ignore_eos=True)
        next(stream)
        assert client.cancel(stream.request_id)
        with pytest.raises(Exception, match=r"(?i)cancel"):
            list(stream)
        assert not client.cancel(stream.request_id)
    eventually(lambda: free_again(cluster))


def test_a_reader_that_does_not_read_holds_nobody_up(cluster):
    """One client takes nothing; others, on the same workers, finish meanwhile."""
    channel = grpc.insecure_channel(cluster.state().grpc)
    stub = inference_pb2_grpc.InferenceStub(channel)
    request = inference_pb2.GenerateRequest(text="z" * 50)
    request.sampling.max_tokens, request.sampling.temperature, request.sampling.ignore_eos = 300, 0.0, True
    silent = stub.Generate(request)
    with cluster.client() as client:
        for _ in range(5):
            assert len(client.generate("hello", max_tokens=30, temperature=0, ignore_eos=True).tokens) == 30
    silent.cancel()
    channel.close()
    eventually(lambda: free_again(cluster))


BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "empty text": ("", {}, InvalidRequest, "text"),
    "empty ids": ([], {}, InvalidRequest, "token_ids"),
    "id beyond the vocabulary": ([1, 99999], {}, InvalidRequest, "99999"),
    "too long": ("x" * 600, {}, InvalidRequest, "512"),
    "10 MB": ("x" * 10_000_000, {}, InvalidRequest, "text|larger"),
    "max_tokens 0": ("hi", {"max_tokens": 0}, InvalidRequest, r"sampling\.max_tokens"),
    "max_tokens -1": ("hi", {"max_tokens": -1}, InvalidRequest, r"sampling\.max_tokens"),
    "temperature nan": ("hi", {"temperature": float("nan")}, InvalidRequest, r"sampling\.temperature"),
    "top_p 0": ("hi", {"top_p": 0.0}, InvalidRequest, r"sampling\.top_p"),
    "unknown model": ("hi", {"model": "gpt-9"}, UnknownModel, "gpt-9"),
    "n": ("hi", {"n": 17}, InvalidRequest, "at most 16 choices"),
    "regex": ("hi", {"regex": "a("}, InvalidRequest, r"constraint\.regex: unclosed group"),
    "schema": ("hi", {"json_schema": "{"}, InvalidRequest, r"constraint\.json_schema: must be a JSON object"),
    "choices": ("hi", {"choices": [""]}, InvalidRequest, r"constraint\.choices"),
    "constraint and min_tokens": ("hi", {"regex": "a", "min_tokens": 2}, InvalidRequest, r"sampling\.min_tokens"),
    "priority": ("hi", {"priority": 101}, InvalidRequest, "priority"),
    "cache scope": ("hi", {"cache_scope": "x" * 257}, InvalidRequest, "cache_scope"),
    "resumable": ("hi", {"resumable_s": 601.0}, InvalidRequest, "resumable_s"),
    "idempotency key": ("hi", {"idempotency_key": "k" * 129}, InvalidRequest, "idempotency_key"),
    "stop too long": ("hi", {"stop": "x" * 300}, InvalidRequest, r"sampling\.stop"),
    "lone surrogate": ("\ud800", {}, InvalidRequest, "text"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_by_name(cluster, case):
    prompt, options, error, named = BAD[case]
    with cluster.client(max_retries=0) as client, pytest.raises(error, match=named):
        client.generate(prompt, **options)


def test_invalid_utf8_on_the_wire_is_refused_and_nobody_dies(cluster):
    before = cluster.processes()
    channel = grpc.insecure_channel(cluster.state().grpc)
    call: Any = channel.unary_stream(
        "/baton.v1.Inference/Generate", request_serializer=lambda b: b, response_deserializer=None
    )
    with pytest.raises(grpc.RpcError) as caught:
        list(call(b"\x12\x02\xff\xfe", timeout=10))
    channel.close()
    assert "bad UTF-8" in str(caught.value.details())  # gRPC parses before we are asked, and calls it UNKNOWN
    assert cluster.processes() == before


def test_a_full_queue_refuses_with_a_delay(module_home):
    """Its own cluster: one place to wait in, and decode room for one long request."""
    sets = [
        *SMALL,
        "router.queue.max_requests=1",
        "router.queue.max_wait_s=0.2",
        "decode.kv_memory=32KiB",
        "model.max_model_len=250",
    ]
    with (
        module_home.cluster("configs/no-ray.yaml", *sets, name="narrow") as narrow,
        narrow.client(max_retries=0) as client,
    ):
        outcomes: list[int | str] = []

        def one(_):
            try:
                answer = client.generate("x" * 150, max_tokens=90, temperature=0, ignore_eos=True)
                outcomes.append(len(answer.tokens))
            except Overloaded as error:
                outcomes.append("overloaded" if error.retry_after_s > 0 else "no delay")

        with ThreadPoolExecutor(12) as pool:
            list(pool.map(one, range(12)))
        assert set(outcomes) == {90, "overloaded"}
        eventually(lambda: free_again(narrow))
