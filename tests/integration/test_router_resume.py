"""Streams that resume after the death of a decode worker at any token, or on a router without the request's state.

Also requests with several answers, and requests repeated with the same key.
"""

import asyncio
from functools import partial

import pytest
from grpc import aio
from structlog.testing import capture_logs

from baton.errors import Cancelled, EngineFault, InvalidRequest, WorkerLost
from baton.rpc.v1 import admin_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1.admin_pb2_grpc import AdminStub
from router.parsing.generate_request import seed_of
from router.request.client_request import ClientCall
from tests.support.in_process_router import LAYOUT, at
from tests.support.routers import PROMPT, asked, ids_of, kinds, recovered, right
from tests.support.waiting import until

MOST = 2 * LAYOUT.block_size + 1
ANSWER = right(PROMPT, MOST)
EDGE = LAYOUT.block_size - len(PROMPT)


@pytest.mark.parametrize("index", [1, 2, EDGE, EDGE + 1, MOST - 1])
async def test_the_stream_goes_on_at_the_same_index(make, index):
    cluster = await make(decode=2)
    first, second = cluster.decode
    first.hold(index)
    call = cluster.call(max_tokens=MOST)
    events = []
    async for event in call:
        events.append(event)
        if len(ids_of(events)) == index and first.alive:
            await first.kill()
    assert ids_of(events) == ANSWER
    assert recovered(events) == [(2, "decode_lost")]
    assert list(cluster.prefill[0].specs[-1].known) == ANSWER[:index]
    assert events[-1].completed.usage.completion_tokens == MOST
    assert events[-1].completed.placement.decode_worker == second.info.ref.worker_id or index == MOST - 1
    await cluster.nothing_is_left()


@pytest.mark.parametrize("attempts", [2, 10])
async def test_a_request_that_workers_die_of_is_stopped(make, attempts):
    """The limit holds even for the last attempt: after WorkerLost, clients would send the request to more workers."""
    cluster = await make(decode=3, attempts=attempts)
    call = await at(cluster, "decoding")
    for worker in cluster.decode[:2]:
        await until(partial(bool, worker.committed), "committed")
        await until(lambda: cluster.handed_over, "decoding, as far as the router knows")
        await worker.kill()
    with pytest.raises(EngineFault, match="2 workers were lost while they computed this request"):
        await cluster.answer(call)
    assert cluster.decode[2].count("reserve") == 0
    await cluster.nothing_is_left()


@pytest.mark.parametrize("count", [0, 1, 2, EDGE, MOST - 1, MOST])
async def test_a_router_that_never_saw_the_request_goes_on_with_it(cluster, count):
    events = await cluster.resume(asked(max_tokens=MOST), ANSWER[:count])
    assert [kind for kind in kinds(events) if kind != "tokens"] == ["accepted", "finished", "completed"]
    assert events[0].request_id == "earlier"
    assert ids_of(events, count) == ANSWER[count:]
    assert list(cluster.prefill[0].specs[0].known) == ANSWER[:count]
    assert events[-1].completed.usage.completion_tokens == MOST
    await cluster.nothing_is_left()


@pytest.mark.parametrize("how", ["Resume", "key"])
async def test_a_call_that_takes_over_is_sampled_as_the_older_one(cluster, how):
    cluster.decode[0].close("decode")
    key = {"idempotency_key": "k"} if how == "key" else {}
    older = cluster.call(**key)
    name = dict(await older.initial_metadata())["baton-request-id"]
    await until(lambda: cluster.decode[0].committed, "decoding")
    known = ANSWER[:1] if how == "Resume" else []
    again = cluster.resume(asked(), known, name=name) if how == "Resume" else cluster.generate(**key)
    newer = asyncio.create_task(again)
    with pytest.raises(Cancelled, match="another call has taken over"):
        await cluster.answer(older)
    cluster.decode[0].open("decode")
    assert ids_of(await newer, len(known)) == ANSWER[len(known) : 8]
    first, second = (spec.sampling.seed for spec in cluster.prefill[0].specs)
    assert first == second
    assert how == "key" or first == seed_of(name)
    await cluster.nothing_is_left()


async def test_a_resumed_stream_is_cancelled_by_the_name_that_the_client_knows(cluster):
    cluster.decode[0].close("decode")
    resumed = asyncio.create_task(cluster.resume(asked(), ANSWER[:1]))
    await until(lambda: cluster.decode[0].committed, "decoding")
    assert (await cluster.stub.Cancel(pb.CancelRequest(request_id="earlier"))).found
    with pytest.raises(Cancelled):
        await resumed
    await cluster.nothing_is_left()


@pytest.mark.parametrize(
    ("received", "words"),
    [
        ([[300]], "received: token id 300 is outside the vocabulary"),
        ([[1] * (MOST + 1)], rf"received: at most max_tokens \({MOST}\)"),
        ([[1], [2]], "received: at most 1 choices, got 2"),
    ],
)
async def test_what_cannot_be_of_this_request(cluster, received, words):
    with pytest.raises(InvalidRequest, match=words):
        await cluster.resume(asked(max_tokens=MOST), *received)
    await cluster.nothing_is_left()


@pytest.mark.parametrize("name", ["", "a b", "\x00", "\u00fc", "x" * 65, "x" * 100_000, "a\n"], ids=range(7))
async def test_a_name_that_is_none(cluster, name):
    with capture_logs() as lines, pytest.raises(InvalidRequest, match="request_id: must be the id of the stream"):
        await cluster.resume(asked(max_tokens=MOST), name=name)
    assert (await cluster.status()).refused == 1
    (kept,) = cluster.router.context.sinks.traces._kept
    (refused,) = (line for line in lines if line["event"] == "request_refused")
    assert name not in (kept, refused["request_id"]), "operators are not shown what anybody may have written"
    assert len(refused["request_id"]) <= 64
    assert "xxx" not in str(refused)


async def test_choices_are_numbered_and_the_first_one_computes_the_prompt(cluster):
    cluster.prefill[0].close("first")
    call = cluster.call(n=3)
    await until(lambda: cluster.prefill[0].specs, "the first choice")
    await asyncio.sleep(0.05)  # time in which the others would arrive
    assert len(cluster.prefill[0].specs) == 1
    cluster.prefill[0].open("first")
    events = await cluster.answer(call)
    assert [ids_of(events, choice=choice) for choice in range(3)] == [ANSWER[:8]] * 3
    assert sorted(event.finished.choice for event in events if event.HasField("finished")) == [0, 1, 2]
    assert (kinds(events).count("accepted"), kinds(events).count("completed")) == (1, 1)
    assert kinds(events)[-1] == "completed"
    assert events[-1].completed.usage.completion_tokens == 24
    assert events[-1].completed.usage.prompt_tokens == 3
    assert [event.seq for event in events] == list(range(len(events)))
    assert len({spec.sampling.seed for spec in cluster.prefill[0].specs}) == 3
    await cluster.nothing_is_left()


async def test_choices_that_are_resumed(cluster):
    received = ANSWER[:2], ANSWER[:8], list[int]()
    events = await cluster.resume(asked(n=3), *received[:2])
    assert [ids_of(events, len(has), choice) for choice, has in enumerate(received)] == [ANSWER[2:8], [], ANSWER[:8]]
    assert sorted(event.finished.choice for event in events if event.HasField("finished")) == [0, 1, 2]
    assert events[-1].completed.usage.completion_tokens == 24


async def test_all_choices_are_in_a_census_and_end_with_one_of_them(make):
    cluster = await make(attempts=1)
    cluster.decode[0].close("decode")
    call = cluster.call(n=2)
    await until(lambda: len(cluster.decode[0].committed) == 2, "both are decoding")
    async with aio.insecure_channel(cluster.router.admin) as channel:
        reply = await AdminStub(channel).Requests(admin_pb2.RequestsRequest())
    assert {handoff.request_id for handoff in cluster.decode[0].committed} == set(reply.request_ids)
    await cluster.decode[0].kill()
    with pytest.raises(WorkerLost):
        await cluster.answer(call)
    await cluster.nothing_is_left()


async def test_who_takes_over_may_be_gone_first(make):
    context = (await make()).router.context
    task = asyncio.current_task()
    assert task is not None
    older, newer = (ClientCall(context.sinks, number, task, 60.0) for number in range(2))

    async def take_over() -> None:
        async with older.scope, context.running.registered(older, "k"):
            async with newer.scope, context.running.registered(newer, "k"):
                pass
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):  # the older stream ends
        await take_over()
    assert str(older.reason) == "another call has taken over this request"
    assert (context.running._named, len(context.running)) == ({}, 0)


async def test_however_many_come_at_once_with_a_key_all_of_them_end(cluster):
    """A request may be taken over at any moment, even while gRPC sends its name."""
    calls = [cluster.call(max_tokens=2, idempotency_key="k") for _ in range(100)]
    ended = await asyncio.wait_for(asyncio.gather(*map(cluster.answer, calls), return_exceptions=True), 10)
    answers = [events for events in ended if not isinstance(events, BaseException)]
    assert {ids_of(events) == ANSWER[:2] for events in answers} == {True}
    assert {type(error) for error in ended if isinstance(error, BaseException)} <= {Cancelled}
    await cluster.nothing_is_left()
