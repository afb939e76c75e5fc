"""Streams that resume after the death of a decode worker at any token, or on a router without the request's state.

Also requests with several answers, requests repeated with the same key, and streams that outlive their router.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
from grpc import aio
from structlog.testing import capture_logs

from baton.core import HandoffId
from baton.errors import Cancelled, EngineFault, InvalidRequest, LedgerError, NoWorker, WorkerLost
from baton.ledger.ownership import OwnershipRecord, RecordState
from baton.rpc.v1 import admin_pb2, worker_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1.admin_pb2_grpc import AdminStub
from baton.rpc.v1.inference_pb2_grpc import InferenceStub
from baton.tokenizer import OracleTokenizer
from router.parsing.generate_request import seed_of
from router.request.client_request import ClientCall
from router.server import serve
from tests.support.in_process_router import LAYOUT, InProcessCluster, at, event
from tests.support.routers import PROMPT, asked, ids_of, kinds, recovered, right
from tests.support.time_factor import scaled
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
    async for item in call:
        events.append(item)
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


async def test_only_tokens_of_the_prompt_count_as_cached_ones_of_it(cluster):
    cluster.prefill[0].cached = [len(PROMPT) + MOST - 2]
    events = await cluster.resume(asked(max_tokens=MOST), ANSWER[: MOST - 4])
    usage = events[-1].completed.usage
    assert (usage.prompt_tokens, usage.cached_tokens) == (len(PROMPT), len(PROMPT))


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
        ([[300]] * 3, "^received: at most 1 choices, got 3$"),
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
    assert sorted(item.finished.choice for item in events if item.HasField("finished")) == [0, 1, 2]
    assert (kinds(events).count("accepted"), kinds(events).count("completed")) == (1, 1)
    assert kinds(events)[-1] == "completed"
    assert events[-1].completed.usage.completion_tokens == 24
    assert events[-1].completed.usage.prompt_tokens == 3
    assert [item.seq for item in events] == list(range(len(events)))
    assert len({spec.sampling.seed for spec in cluster.prefill[0].specs}) == 3
    await cluster.nothing_is_left()


async def test_choices_that_are_resumed(cluster):
    received = ANSWER[:2], ANSWER[:8], list[int]()
    events = await cluster.resume(asked(n=3), *received[:2])
    assert [ids_of(events, len(has), choice) for choice, has in enumerate(received)] == [ANSWER[2:8], [], ANSWER[:8]]
    assert sorted(item.finished.choice for item in events if item.HasField("finished")) == [0, 1, 2]
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
    ended = await asyncio.wait_for(asyncio.gather(*map(cluster.answer, calls), return_exceptions=True), scaled(10))
    answers = [events for events in ended if not isinstance(events, BaseException)]
    assert {ids_of(events) == ANSWER[:2] for events in answers} == {True}
    assert {type(error) for error in ended if isinstance(error, BaseException)} <= {Cancelled}
    await cluster.nothing_is_left()


# --- a router stops during a stream: its decode worker goes on, and another router takes the stream over

TOKENS, SEEN = 12, 4
RESUMABLE = right(PROMPT, TOKENS)


def resumable(**fields) -> pb.GenerateRequest:
    return asked(max_tokens=TOKENS, **{"resumable_s": 30.0, **fields})


class Second:
    """Another router over the same workers. `records`: the ledger's records of streams."""

    def __init__(self, cluster: InProcessCluster, records: Mapping[str, OwnershipRecord | LedgerError]) -> None:
        self._cluster, self._records = cluster, records
        self.looked_for: list[str] = []

    async def find(self, stream: str) -> OwnershipRecord | None:
        self.looked_for.append(stream)
        if isinstance(found := self._records.get(stream), LedgerError):
            raise found
        return found

    async def __aenter__(self) -> Second:
        settings = replace(self._cluster.settings, name="second")
        self.router = await serve(settings, self._cluster.source, OracleTokenizer(), streams=self.find)
        pool, workers = self.router.context.pool, self._cluster.workers
        await until(lambda: sum(link.usable for link in pool.links) == len(workers), "it knows every worker")
        self.channel = self.router.context.wire.aio(self.router.grpc)
        self.stub = InferenceStub(self.channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.router.stop(grace_s=0.0)

    async def resume(self, name: str, request: pb.GenerateRequest, *received: list[int], fingerprint: str = ""):
        return await self._cluster.resume(request, *received, name=name, fingerprint=fingerprint, at=self.stub)


def record(cluster: InProcessCluster, stream: str) -> OwnershipRecord:
    ref = cluster.decode[0].info.ref
    return OwnershipRecord(HandoffId(stream, 1), RecordState.COMMITTED, ref.worker_id, ref.incarnation, "router-gone")


async def left(cluster: InProcessCluster, request: pb.GenerateRequest, n: int = 1) -> str:
    """Start a stream and stop its router. Return its name. Its worker holds with more tokens, but not all."""
    decode = cluster.decode[0]
    decode.hold(SEEN + 3)
    call = cluster.stub.Generate(request)
    name = str(dict(await call.initial_metadata())["baton-request-id"])
    seen: Counter[int] = Counter()
    async for item in call:
        if item.HasField("tokens"):
            seen[item.tokens.choice] += len(item.tokens.ids)
            if len(seen) == n and min(seen.values()) == SEEN + 3:
                break
    await cluster.router.stop(grace_s=0.0)
    with pytest.raises((aio.AioRpcError, NoWorker)):
        await cluster.answer(call)
    return name


async def moved(cluster: InProcessCluster, request: pb.GenerateRequest, *received: list[int], fingerprint: str = ""):
    """Stop the router of a stream and return the rest of the stream from another router."""
    name = await left(cluster, request, len(received))
    streams = [name, *(f"{name}.{choice}" for choice in range(1, len(received)))]
    async with Second(cluster, {each: record(cluster, each) for each in streams}) as second:
        cluster.decode[0].open("hold")
        events = await second.resume(name, request, *received, fingerprint=fingerprint)
        await until(lambda: cluster.decode[0].count("release"), "released")
    return events


@pytest.mark.parametrize("ended", [False, True])
async def test_it_goes_on_where_it_is(cluster, ended):
    """A stream may have ended by then, without a router."""
    name = await left(cluster, resumable())
    decode = cluster.decode[0]
    assert decode.count("release") == 0, "what may be resumed is left to its worker"
    if ended:
        decode.open("hold")
        await until(lambda: decode.holds_nothing, "the stream has ended")
    async with Second(cluster, {name: record(cluster, name)}) as second:
        decode.open("hold")
        events = await second.resume(name, resumable(), RESUMABLE[:SEEN])
        assert second.looked_for == [name]
        await until(lambda: decode.count("release"), "released")
    assert ids_of(events, SEEN) == RESUMABLE[SEEN:]
    assert kinds(events)[0] == "accepted"
    assert kinds(events)[-2:] == ["finished", "completed"]
    assert [kind for kind, of in decode.commands if of == HandoffId(name, 1)] == ["reserve", "attach", "release"]
    assert len(cluster.prefill[0].specs) == 1
    done = events[-1].completed
    assert (done.placement.prefill_worker, done.placement.decode_worker) == ("", "decode-0")
    assert done.usage.completion_tokens == TOKENS
    assert done.timings.prefill_s == 0 or done.timings.prefill_s < done.timings.e2e_s


async def test_every_choice_is_found(cluster):
    events = await moved(cluster, resumable(n=2), RESUMABLE[:SEEN], RESUMABLE[:1])
    assert (ids_of(events, SEEN), ids_of(events, 1, choice=1)) == (RESUMABLE[SEEN:], RESUMABLE[1:])
    assert cluster.decode[0].count("attach") == 2


@pytest.mark.parametrize(("deterministic", "fingerprint"), [(True, "x"), (False, "x"), (False, "z"), (False, "")])
async def test_a_worker_goes_on_if_its_bits_are_those_that_it_was_begun_with(make, deterministic, fingerprint):
    cluster = await make(bits={"prefill-0": "x", "decode-0": "x"})
    events = await moved(cluster, resumable(deterministic=deterministic), RESUMABLE[:SEEN], fingerprint=fingerprint)
    assert ids_of(events, SEEN) == RESUMABLE[SEEN:]
    assert cluster.decode[0].count("attach") == 1
    assert events[-1].completed.system_fingerprint == "x"
    assert bool(events[-1].completed.usage.audit_digest) == deterministic


async def test_another_worker_than_it_was_begun_with_does_not_go_on(make):
    cluster = await make(bits={"prefill-0": "x", "decode-0": "x"}, queue_max_wait_s=0.1)
    name = await left(cluster, resumable(deterministic=True))
    async with Second(cluster, {name: record(cluster, name)}) as second:
        with pytest.raises(NoWorker, match="no decode worker with the system fingerprint z that computes"):
            await second.resume(name, resumable(deterministic=True), RESUMABLE[:SEEN], fingerprint="z")
    assert cluster.decode[0].count("attach") == 0


@pytest.mark.parametrize("why", ["no record", "no ledger", "another worker", "refused", "not asked for"])
async def test_else_it_is_computed_again(cluster, why):
    """The stream continues at the same index. Its name is new, because workers may have attempts of the old one."""
    name = await left(cluster, resumable())
    decode = cluster.decode[0]
    request = resumable(resumable_s=0.0) if why == "not asked for" else resumable()
    found = record(cluster, name)
    records: dict[str, Mapping[str, OwnershipRecord | LedgerError]] = {
        "no record": {},
        "no ledger": {name: LedgerError("away")},
        "another worker": {name: replace(found, worker_id="decode-9")},
    }
    if why == "refused":
        decode.refuse_once = [worker_pb2.REFUSAL_REASON_STALE]
    async with Second(cluster, records.get(why, {name: found})) as second:
        decode.open("hold")
        events = await second.resume(name, request, RESUMABLE[:SEEN])
        assert second.looked_for == ([] if why == "not asked for" else [name])
        metrics = await cluster.http("/metrics", second.router)
    assert ids_of(events, SEEN) == RESUMABLE[SEEN:]
    assert list(cluster.prefill[0].specs[-1].known) == RESUMABLE[:SEEN]
    assert decode.count("attach") == (why == "refused")
    if why == "refused":  # D may keep the stream for another request, so it gets no Release of this name
        attached = next(handoff for kind, handoff in decode.commands if kind == "attach")
        assert ("release", attached) not in decode.commands
    assert ('baton_recoveries_total{reason="not_there"} 1.0' in metrics) == (why == "refused")
    assert "recovered" not in kinds(events)


async def test_the_worker_dies_after_all(make):
    cluster = await make(decode=2)
    name, first = await left(cluster, resumable()), cluster.decode[0]
    async with Second(cluster, {name: record(cluster, name)}) as second:
        resumed = asyncio.create_task(second.resume(name, resumable(), RESUMABLE[:SEEN]))
        await until(lambda: any(call.observer.is_accepted for call in second.router.context.running), "attached")
        await first.kill()
        events = await resumed
    assert ids_of(events, SEEN) == RESUMABLE[SEEN:]
    assert recovered(events) == [(2, "decode_lost")]


async def test_a_stream_of_another_router_is_in_a_census(cluster):
    """Its worker keeps the handoff of the first router."""
    name = await left(cluster, resumable())
    async with Second(cluster, {name: record(cluster, name)}) as second:
        resumed = asyncio.create_task(second.resume(name, resumable(), RESUMABLE[:SEEN]))
        await until(lambda: any(call.observer.is_accepted for call in second.router.context.running), "attached")
        async with aio.insecure_channel(second.router.admin) as channel:
            reply = await AdminStub(channel).Requests(admin_pb2.RequestsRequest())
        assert name in reply.request_ids
        cluster.decode[0].open("hold")
        await resumed


async def test_a_router_that_is_left_by_its_stream_asks_for_nothing_else(cluster):
    decode = cluster.decode[0]
    decode.close("decode")
    call = cluster.stub.Generate(resumable())
    name = dict(await call.initial_metadata())["baton-request-id"]
    await until(lambda: cluster.handed_over, "decoding")
    gone = worker_pb2.Failed(kind="Cancelled", message="router-b has taken over")
    decode.emit(event(HandoffId(name, 1), failed=gone))
    with pytest.raises(Exception, match="router-b has taken over"):
        await cluster.answer(call)
    assert (decode.count("reserve"), decode.count("release")) == (1, 0)
    decode._drop(HandoffId(name, 1))


async def test_how_long_is_said_with_the_reservation(make):
    cluster = await make(resumable_s=7.0)
    unsaid = resumable()
    unsaid.ClearField("resumable_s")
    for request in (resumable(), resumable(resumable_s=0.0), unsaid):
        await cluster.answer(cluster.stub.Generate(request))
    said = [(each.resumable_s, bool(each.stream)) for each in cluster.decode[0].reserves]
    assert said == [(30.0, True), (0.0, False), (7.0, True)]
