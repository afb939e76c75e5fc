"""Behaviour specific to gRPC: chunks, tickets, and calls that end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import cast

import pytest

from baton.errors import ChannelBroken
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.transports import grpc
from kvtransfer.transports.base import KeyRelay, Ring, Side
from kvtransfer.transports.grpc import CHUNK_BYTES, GrpcReceiver, GrpcTransport
from tests.support.time_factor import scaled
from tests.support.waiting import eventually
from tests.unit.kvtransfer.ends import Stopped
from tests.unit.kvtransfer.transports.pairs import NAME, PATIENT_S, RING, mute

Chunks = asyncio.Queue[pb.DataChunk | None]


async def chunks_of(queue: Chunks) -> AsyncIterator[pb.DataChunk]:
    """Yield the chunks of one Data call. None ends it."""
    while (chunk := await queue.get()) is not None:
        yield chunk


def call_of(*chunks: pb.DataChunk | None) -> AsyncIterator[pb.DataChunk]:
    """Return a call that stays open after these chunks."""
    queue: Chunks = asyncio.Queue()
    for chunk in chunks:
        queue.put_nowait(chunk)
    return chunks_of(queue)


class GrpcEnd:
    """A receiver with an accepted ticket and no network: `take` runs in the test's own loop."""

    ring = Ring(3, 4 << 20)

    async def open(self, *expected: int, deadline_s: float = 5.0) -> GrpcEnd:
        """Open the receiver. `expected`: bytes of the frames that it starts."""
        self.transport, self.chunks = GrpcTransport("decode:1"), Chunks()
        told = mute()
        keys = KeyRelay(told.deliver)
        opening = asyncio.create_task(
            asyncio.to_thread(self.transport.open, NAME, Side.RECEIVER, keys, self.ring, deadline_s)
        )
        key = await asyncio.to_thread(told.receive, 5.0)
        assert key is not None
        self.ticket, _, address = key[1].decode().partition(" ")
        assert address == "decode:1"
        self.call = asyncio.create_task(self.transport.take(chunks_of(self.chunks)))
        self.say(pb.DataChunk(ticket=self.ticket))
        self.end = cast(GrpcReceiver, await opening)
        for number, nbytes in enumerate(expected):
            self.end.start(number, nbytes)
        return self

    def say(self, *chunks: pb.DataChunk | bytes | None) -> None:
        for chunk in chunks:
            self.chunks.put_nowait(pb.DataChunk(data=chunk) if isinstance(chunk, bytes) else chunk)

    def holds(self, number: int, data: bytes) -> bool:
        return bytes(self.end.slot(number)[: len(data)].tolist()) == data

    async def finish(self, number: int) -> None:
        await asyncio.to_thread(self.end.finish, number)

    async def ended(self) -> str:
        """Return the error that ended the call, or "" without one."""
        failure = (await asyncio.gather(self.call, return_exceptions=True))[0]
        return str(failure or "")


async def turns() -> None:
    """Run the loop until all ready tasks have run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_chunks_land_where_they_belong_and_what_was_whole_before_the_end_is_there() -> None:
    channel = await GrpcEnd().open(CHUNK_BYTES + 3, 2, 2)
    channel.say(b"a" * CHUNK_BYTES, b"bcd", b"ef", b"g", None)
    assert await channel.ended() == ""
    for number, data in enumerate([b"a" * CHUNK_BYTES + b"bcd", b"ef"]):
        await channel.finish(number)
        assert channel.holds(number, data)
    with pytest.raises(ChannelBroken, match="closed by the peer"):
        await channel.finish(2)


async def test_a_chunk_waits_for_its_frame_and_holds_up_those_behind_it() -> None:
    channel = await GrpcEnd().open()
    channel.end.slot(1).zero_()
    channel.say(b"ab", b"cd", b"ef")
    await turns()
    assert channel.chunks.qsize() == 2  # the ticket was taken, and one chunk is in hand
    channel.end.start(0, 4)
    await channel.finish(0)
    assert channel.holds(0, b"abcd")
    await turns()
    assert channel.chunks.empty()  # the next chunk is in hand, in no slot
    assert channel.holds(1, bytes(2))
    channel.end.close()
    assert "closed" in await channel.ended()


@pytest.mark.parametrize("pieces", [[9], [5, 4], [CHUNK_BYTES + 1], [0]], ids="longer over large empty".split())
async def test_what_is_no_part_of_the_expected_frame_breaks_the_channel(pieces: list[int]) -> None:
    channel = await GrpcEnd().open(8 if max(pieces) < CHUNK_BYTES else 2 * CHUNK_BYTES, deadline_s=PATIENT_S)
    channel.say(*map(bytes, pieces))
    with pytest.raises(ChannelBroken, match="frame 0 of"):
        await channel.finish(0)
    assert "frame 0 of" in await channel.ended()
    with pytest.raises(ChannelBroken):
        channel.end.start(1, 8)


@pytest.mark.parametrize(("cut", "why"), [(True, "the stream of the peer was cut"), (False, "no progress")])
async def test_a_short_frame_ends_at_once_with_a_cut_call_or_else_by_the_deadline(cut: bool, why: str) -> None:
    channel = await GrpcEnd().open(8)
    channel.end._deadline_s = PATIENT_S if cut else 0.05
    channel.say(bytes(7))
    await turns()
    assert channel.end._at == 7
    wait_for = Stopped(channel.end._changed, "wait_for")
    waiting = asyncio.create_task(channel.finish(0))
    await asyncio.to_thread(wait_for.wait)  # the thread holds the lock until it waits
    if cut:
        channel.call.cancel()
    wait_for.go_on()
    with pytest.raises(ChannelBroken, match=why):
        await asyncio.wait_for(waiting, scaled(10))
    assert ("closed" in await channel.ended()) == (not cut)


@pytest.mark.parametrize("ticket", ["", "unknown"])
async def test_an_unknown_ticket_ends_the_call_and_nothing_else(ticket: str) -> None:
    channel = await GrpcEnd().open(2)
    for named in (ticket, channel.ticket):  # a ticket is valid for one call
        with pytest.raises(ChannelBroken, match="ticket"):
            await channel.transport.take(call_of(pb.DataChunk(ticket=named, data=b"x" * 100)))
    channel.say(b"ok")
    await channel.finish(0)
    channel.end.close()
    await channel.ended()


async def test_the_ticket_of_an_end_that_gave_up_is_unknown() -> None:
    transport, told = GrpcTransport("decode:1"), mute()
    with pytest.raises(ChannelBroken, match="not built"):
        await asyncio.to_thread(transport.open, NAME, Side.RECEIVER, KeyRelay(told.deliver), RING, 0.05)
    key = told.receive(5.0)
    assert key is not None
    with pytest.raises(ChannelBroken, match="no channel here waits"):
        await transport.take(call_of(pb.DataChunk(ticket=key[1].decode().split()[0])))


async def test_a_call_without_a_ticket_ends(monkeypatch) -> None:
    monkeypatch.setattr(grpc, "_TICKET_S", 0.05)
    for call in (call_of(), call_of(None)):  # silent, and empty
        with pytest.raises(ChannelBroken, match="no ticket"):
            await GrpcTransport("decode:1").take(call)


def test_a_sender_is_not_kept_by_an_address_where_nobody_is() -> None:
    keys = mute()
    keys.deliver("grpc", b"ticket 127.0.0.1:1")
    before = threading.active_count()
    with pytest.raises(ChannelBroken, match="not built"):
        GrpcTransport().open(NAME, Side.SENDER, keys, RING, 0.5)
    eventually(lambda: threading.active_count() <= before)
