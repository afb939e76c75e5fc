"""Waiting and rejected requests, through a real router over real gRPC."""

import asyncio
from functools import partial
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from baton.errors import Overloaded
from baton.rpc.v1 import worker_pb2
from tests.support.in_process_router import at
from tests.support.routers import ids_of
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
        await asyncio.wait_for(cluster.generate(), 10)
    await cluster.nothing_is_left()
