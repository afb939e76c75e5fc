"""Waiting and rejected requests, and limits on concurrent reading, through a real router over real gRPC."""

import asyncio
import threading
from functools import partial
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status import rpc_status

from baton.errors import Overloaded, PromiseRefused
from baton.limits import MAX_READ_AT_ONCE
from baton.rpc.status import from_rpc_error
from baton.rpc.v1 import common_pb2, worker_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.tokenizer import OracleTokenizer
from tests.integration.access_support import bearer, token_file
from tests.support.in_process_router import at
from tests.support.routers import ids_of
from tests.support.time_factor import scaled
from tests.support.waiting import until


async def waits(cluster, **fields):
    """Start a call and wait until it is queued."""
    before = cluster.router.context.admission.waiting
    call = cluster.call(**fields)
    await until(partial(cluster.waits, before + 1), "queued")
    return call


async def test_a_refusal_says_over_grpc_when_to_come_back(make):
    cluster = await make(blocks=1, queue_max_requests=1)
    await at(cluster, "queued")
    with pytest.raises(grpc.aio.AioRpcError, match="1 requests wait already") as caught:
        await anext(aiter(cluster.call()))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status: Any = rpc_status.from_call(cast("Any", caught.value))
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    assert 0.5 <= retry.retry_delay.ToTimedelta().total_seconds() <= 10
    assert 'baton_refusals_total{reason="Overloaded"} 1.0' in await cluster.http("/metrics")


async def test_the_bound_in_tokens(make):
    cluster = await make(blocks=1, queue_max_tokens=100)
    await at(cluster, "queued")
    with pytest.raises(Overloaded, match="3 tokens wait already, 98 more exceed the limit"):
        await cluster.generate([1] * 98)
    await waits(cluster, prompt=[1] * 97)
    status = await cluster.status()
    assert (status.queued, status.queued_tokens, status.drain_requests_per_s) == (2, 100, 0)
    text = await cluster.http("/metrics")
    assert "baton_queued_requests 2.0" in text
    assert "baton_queued_tokens 100.0" in text


async def test_choices_of_an_accepted_request_are_not_turned_away(make):
    """The client already has the first tokens of one choice."""
    cluster = await make(blocks=1, queue_max_requests=1)
    events = await cluster.generate(n=4, max_tokens=4)
    assert sorted(event.finished.choice for event in events if event.HasField("finished")) == [0, 1, 2, 3]
    await cluster.nothing_is_left()


async def test_tenants_take_turns(make):
    cluster = await make(blocks=1, tenants={"heavy": 2.0})
    decode = cluster.decode[0]
    decode.close("decode")
    calls = [cluster.call([9])]
    await until(lambda: decode.count("reserve") == 1, "first one placed")
    for mark, tenant in enumerate(("busy", "light", "heavy"), 1):
        for number in range(4):
            calls.append(await waits(cluster, prompt=[mark, number], cache_scope=tenant))
    decode.open("decode")
    for call in calls:
        assert len(ids_of(await cluster.answer(call))) == 8
    served = [list(spec.prompt) for spec in cluster.prefill[0].specs[1:]]
    marks = [mark for mark, _ in served]
    assert marks[:3] == [1, 2, 3]
    assert sorted(marks[:8]) == [1, 1, 2, 2, 3, 3, 3, 3]
    for mark in (1, 2, 3):
        assert [number for of, number in served if of == mark] == [0, 1, 2, 3], "each tenant's in order"
    await cluster.nothing_is_left()


async def test_waiting_again_after_no_room_is_the_same_wait(make):
    """A worker that repeatedly reports free capacity and then rejects does not block a request forever."""
    cluster = await make(queue_max_wait_s=0.4)
    cluster.decode[0].refuse_once = [worker_pb2.REFUSAL_REASON_NO_ROOM] * 100_000
    with pytest.raises(Overloaded, match=r"waited 0\.4 s for capacity"):
        await asyncio.wait_for(cluster.generate(), scaled(10))
    await cluster.nothing_is_left()


# --- limits on concurrent reading: calls that are held in the tokenizer, and rejected calls

LARGE = "x" * 5000
HELD = pb.TokenizeRequest(text=LARGE)


class HeldTokenizer(OracleTokenizer):
    """Makes long texts wait for `go`."""

    def __init__(self):
        self.go = threading.Event()
        self.begun = 0

    def encode(self, text):
        if len(text) == len(LARGE):
            self.begun += 1
            self.go.wait(scaled(30))
        return super().encode(text)


@pytest.fixture
def tokenizer(monkeypatch):
    """The tokenizer of the test's router."""
    made = HeldTokenizer()
    monkeypatch.setattr("tests.support.in_process_router.OracleTokenizer", lambda: made)
    yield made
    made.go.set()


async def refused(call):
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    error = from_rpc_error(caught.value)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s > 0
    return str(error)


def refusals(cluster, reason="Overloaded"):
    read = cluster.router.context.sinks.metrics.registry.get_sample_value
    return read("baton_refusals_total", {"reason": reason})


async def test_one_too_many_is_refused_at_once_and_the_others_are_answered(tokenizer, cluster):
    stub = cluster.stub
    ends = [asyncio.ensure_future(_end(stub.Tokenize(HELD))) for _ in range(MAX_READ_AT_ONCE + 1)]
    await until(lambda: any(end.done() for end in ends), "one is refused")
    await refused(stub.Detokenize(pb.DetokenizeRequest(ids=[104] * 5000)))
    await refused(stub.Generate(pb.GenerateRequest(text=LARGE)).read())
    assert (await stub.Tokenize(pb.TokenizeRequest(text="hi"))).ids == [104, 105]
    assert (await stub.Detokenize(pb.DetokenizeRequest(ids=[104, 105]))).text == "hi"
    assert (refusals(cluster), cluster.router.context.sinks.outcomes["refused"]) == (3, 1)
    tokenizer.go.set()
    assert sorted(await asyncio.gather(*ends)) == [0] + [len(LARGE)] * MAX_READ_AT_ONCE
    assert await _end(stub.Tokenize(HELD)) == len(LARGE)


async def _end(call):
    """Return the number of tokens, 0 for a rejection, and -1 for another error."""
    try:
        return len((await call).ids)
    except aio.AioRpcError as error:
        return 0 if isinstance(from_rpc_error(error), Overloaded) else -1


async def test_a_token_has_so_many_texts_at_once_beside_its_requests(tokenizer, make, tmp_path):
    cluster = await make(tokens=token_file(tmp_path / "tokens", max_concurrent=1))
    stub, alice = cluster.stub, {"metadata": bearer("alice")}
    held = asyncio.ensure_future(stub.Generate(pb.GenerateRequest(text=LARGE), **alice).read())
    await until(lambda: tokenizer.begun == 1, "the request is being read")
    text = asyncio.ensure_future(_end(stub.Tokenize(HELD, **alice)))
    await until(lambda: tokenizer.begun == 2, "and a text beside it")
    assert "at most 1 concurrent requests" in await refused(stub.Tokenize(HELD, **alice))
    assert (await stub.Detokenize(pb.DetokenizeRequest(ids=[104]), **alice)).text == "h"
    others = asyncio.ensure_future(_end(stub.Tokenize(HELD, metadata=bearer("bob"))))
    await until(lambda: tokenizer.begun == 3, "one of another tenant")
    assert refusals(cluster, "RateLimited") == 1
    tokenizer.go.set()
    assert [await text, await others] == [len(LARGE)] * 2
    held.cancel()


# --- promises of latency


async def test_a_promise_is_refused_with_its_facts_or_kept_and_counted(make):
    cluster = await make()
    with pytest.raises(PromiseRefused, match="before each worker has measured some steps"):
        await cluster.generate(ttft_ms=60_000.0)
    for worker in cluster.workers:  # 1 ms per step and token
        worker.load_fields = {f"{worker.role}_pace": common_pb2.Pace(steps=64, tokens=64, context=64, seconds=0.064)}
    assert len(ids_of(await cluster.generate())) == 8
    with pytest.raises(PromiseRefused, match="a TTFT of 1 ms cannot be promised now") as caught:
        await cluster.generate([1] * 50, ttft_ms=1.0)
    assert caught.value.ttft_ms > 1.0
    assert caught.value.retry_after_s > 0
    assert len(ids_of(await cluster.generate(ttft_ms=60_000.0, itl_ms=60_000.0))) == 8
    status = await cluster.status()
    assert (status.promises_kept, status.promises_broken, status.promises_refused) == (1, 0, 2)
    text = await cluster.http("/metrics")
    assert 'baton_promises_total{outcome="kept"} 1.0' in text
    assert 'baton_promise_calibration_total{bin="5",latency="ttft"}' in text
    await cluster.nothing_is_left()
