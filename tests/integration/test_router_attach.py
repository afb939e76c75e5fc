"""A router stops during a stream. Its decode worker goes on, and another router takes the stream over."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from grpc import aio

from baton.core import HandoffId
from baton.errors import LedgerError, NoWorker
from baton.ledger.ownership import OwnershipRecord, RecordState
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1 import worker_pb2
from baton.rpc.v1.inference_pb2_grpc import InferenceStub
from baton.tokenizer import OracleTokenizer
from router.server import serve
from tests.support.in_process_router import InProcessCluster, event
from tests.support.routers import PROMPT, asked, ids_of, kinds, recovered, right
from tests.support.waiting import until

MOST, SEEN = 12, 4
ANSWER = right(PROMPT, MOST)


def resumable(**fields) -> pb.GenerateRequest:
    return asked(max_tokens=MOST, **{"resumable_s": 30.0, **fields})


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
    """Also a stream that has ended by then, without a router."""
    name = await left(cluster, resumable())
    decode = cluster.decode[0]
    assert decode.count("release") == 0, "what may be resumed is left to its worker"
    if ended:
        decode.open("hold")
        await until(lambda: decode.holds_nothing, "the stream has ended")
    async with Second(cluster, {name: record(cluster, name)}) as second:
        decode.open("hold")
        events = await second.resume(name, resumable(), ANSWER[:SEEN])
        assert second.looked_for == [name]
        await until(lambda: decode.count("release"), "released")
    assert ids_of(events, SEEN) == ANSWER[SEEN:]
    assert kinds(events)[0] == "accepted"
    assert kinds(events)[-2:] == ["finished", "completed"]
    assert [kind for kind, of in decode.commands if of == HandoffId(name, 1)] == ["reserve", "attach", "release"]
    assert len(cluster.prefill[0].specs) == 1
    done = events[-1].completed
    assert (done.placement.prefill_worker, done.placement.decode_worker) == ("", "decode-0")
    assert done.usage.completion_tokens == MOST
    assert done.timings.prefill_s == 0 or done.timings.prefill_s < done.timings.e2e_s


async def test_every_choice_is_found(cluster):
    events = await moved(cluster, resumable(n=2), ANSWER[:SEEN], ANSWER[:1])
    assert (ids_of(events, SEEN), ids_of(events, 1, choice=1)) == (ANSWER[SEEN:], ANSWER[1:])
    assert cluster.decode[0].count("attach") == 2


@pytest.mark.parametrize(("deterministic", "fingerprint"), [(True, "x"), (False, "x"), (False, "z"), (False, "")])
async def test_a_worker_goes_on_if_its_bits_are_those_that_it_was_begun_with(make, deterministic, fingerprint):
    cluster = await make(bits={"prefill-0": "x", "decode-0": "x"})
    events = await moved(cluster, resumable(deterministic=deterministic), ANSWER[:SEEN], fingerprint=fingerprint)
    assert ids_of(events, SEEN) == ANSWER[SEEN:]
    assert cluster.decode[0].count("attach") == 1
    assert events[-1].completed.system_fingerprint == "x"
    assert bool(events[-1].completed.usage.audit_digest) == deterministic


async def test_another_worker_than_it_was_begun_with_does_not_go_on(make):
    cluster = await make(bits={"prefill-0": "x", "decode-0": "x"}, queue_max_wait_s=0.1)
    name = await left(cluster, resumable(deterministic=True))
    async with Second(cluster, {name: record(cluster, name)}) as second:
        with pytest.raises(NoWorker, match="no decode worker with the system fingerprint z that computes"):
            await second.resume(name, resumable(deterministic=True), ANSWER[:SEEN], fingerprint="z")
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
        events = await second.resume(name, request, ANSWER[:SEEN])
        assert second.looked_for == ([] if why == "not asked for" else [name])
        metrics = await cluster.http("/metrics", second.router)
    assert ids_of(events, SEEN) == ANSWER[SEEN:]
    assert list(cluster.prefill[0].specs[-1].known) == ANSWER[:SEEN]
    assert decode.count("attach") == (why == "refused")
    assert ('baton_recoveries_total{reason="not_there"} 1.0' in metrics) == (why == "refused")
    assert "recovered" not in kinds(events)


async def test_the_worker_dies_after_all(make):
    cluster = await make(decode=2)
    name, first = await left(cluster, resumable()), cluster.decode[0]
    async with Second(cluster, {name: record(cluster, name)}) as second:
        resumed = asyncio.create_task(second.resume(name, resumable(), ANSWER[:SEEN]))
        await until(lambda: any(call.observer.is_accepted for call in second.router.context.running), "attached")
        await first.kill()
        events = await resumed
    assert ids_of(events, SEEN) == ANSWER[SEEN:]
    assert recovered(events) == [(2, "decode_lost")]


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
