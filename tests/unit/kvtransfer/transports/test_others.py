"""What is particular to gloo, to memory and to gRPC."""

import asyncio
import gc
import threading

import pytest

from baton.errors import ChannelBroken, ConfigError
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.transport import KeyRelay, Ring, Side
from kvtransfer.transports import grpc_bytes
from kvtransfer.transports.gloo import GlooTransport
from kvtransfer.transports.grpc_bytes import CHUNK_BYTES, GrpcTransport
from kvtransfer.transports.memory import MemoryTransport
from tests.support.time_factor import scaled
from tests.unit.kvtransfer.transports.pairs import NAME, RING, descriptors, settled


def test_a_gloo_pair_that_cannot_be_built_keeps_no_descriptor() -> None:
    before, errors = descriptors(), []
    transport = GlooTransport("127.0.0.1")
    gc.disable()
    try:
        for _ in range(2):
            with pytest.raises(ChannelBroken, match="not built") as caught:
                transport.open(NAME, Side.SENDER, KeyRelay(lambda key, value: None), RING, 0.05)
            errors.append(caught.value)
        assert settled(lambda: descriptors() == before)
    finally:
        gc.enable()


def test_gloo_refuses_a_foreign_address() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        GlooTransport("192.0.2.1")


def test_two_objects_of_memory_do_not_reach_each_other() -> None:
    assert MemoryTransport().reach != MemoryTransport().reach


def test_memory_ends_with_different_rings_do_not_meet(pool) -> None:
    memory, keys = MemoryTransport(), KeyRelay(lambda key, value: None)
    ends = [pool.submit(memory.open, NAME, side, keys, Ring(1 + side, 64), 5.0) for side in Side]
    failed, opened = sorted(ends, key=lambda end: end.exception(10) is None)
    with pytest.raises(ChannelBroken, match="instead of"):
        failed.result()
    with pytest.raises(ChannelBroken, match="closed"):
        opened.result().start(0, 8)


def test_a_memory_end_that_gave_up_is_not_met_later() -> None:
    memory, keys = MemoryTransport(), KeyRelay(lambda key, value: None)
    for side in (Side.SENDER, Side.RECEIVER):
        with pytest.raises(ChannelBroken, match="no other end"):
            memory.open(NAME, side, keys, RING, 0.05)


class Chunks:
    """The chunks of one call of Data, as the test says them; None ends the call."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[pb.DataChunk | None] = asyncio.Queue()
        self.taken = 0

    def __aiter__(self) -> "Chunks":
        return self

    async def __anext__(self) -> pb.DataChunk:
        chunk = await self.queue.get()
        if chunk is None:
            raise StopAsyncIteration
        self.taken += 1
        return chunk


class GrpcEnd:
    """A receiver that was told its ticket, fed without a network: `take` runs in the test's own loop."""

    ring = Ring(2, 4 << 20)

    async def open(self, deadline_s: float = 5.0) -> None:
        self.transport, self.chunks = GrpcTransport("decode:1"), Chunks()
        told = KeyRelay(lambda key, value: None)
        keys = KeyRelay(told.deliver)
        opening = asyncio.create_task(
            asyncio.to_thread(self.transport.open, NAME, Side.RECEIVER, keys, self.ring, deadline_s)
        )
        key = await asyncio.to_thread(told.receive, 5.0)
        assert key is not None
        self.ticket, _, address = key[1].decode().partition(" ")
        assert address == "decode:1"
        self.call = asyncio.create_task(self.transport.take(self.chunks))
        self.say(pb.DataChunk(ticket=self.ticket))
        self.end = await opening

    def say(self, chunk: pb.DataChunk | None) -> None:
        self.chunks.queue.put_nowait(chunk)

    async def finish(self, number: int) -> None:
        await asyncio.to_thread(self.end.finish, number)

    async def ended(self) -> str:
        """How the call ended; "" if it did so in good order."""
        failure = (await asyncio.gather(self.call, return_exceptions=True))[0]
        return str(failure or "")


async def test_chunks_land_where_they_belong() -> None:
    channel = GrpcEnd()
    await channel.open()
    for number, nbytes in ((0, CHUNK_BYTES + 3), (1, 2)):
        channel.end.start(number, nbytes)
    channel.say(pb.DataChunk(data=b"a" * CHUNK_BYTES))
    channel.say(pb.DataChunk(data=b"bcd"))
    channel.say(pb.DataChunk(data=b"ef"))
    channel.say(None)
    await channel.finish(0)
    await channel.finish(1)
    assert set(channel.end.slot(0)[:CHUNK_BYTES].tolist()) == {ord("a")}
    assert channel.end.slot(0)[CHUNK_BYTES : CHUNK_BYTES + 3].tolist() == list(b"bcd")
    assert channel.end.slot(1)[:2].tolist() == list(b"ef")
    assert await channel.ended() == ""
    channel.end.close()


async def test_a_chunk_waits_for_its_frame_and_holds_up_those_behind_it() -> None:
    channel = GrpcEnd()
    await channel.open()
    channel.end.slot(1).zero_()
    for piece in (b"ab", b"cd", b"ef"):
        channel.say(pb.DataChunk(data=piece))
    for _ in range(20):
        await asyncio.sleep(0)
    assert channel.chunks.taken == 2  # the ticket, and one chunk in hand
    channel.end.start(0, 4)
    await channel.finish(0)
    assert channel.end.slot(0)[:4].tolist() == list(b"abcd")
    for _ in range(20):
        await asyncio.sleep(0)
    assert channel.chunks.taken == 4  # the next one is in hand, in no slot
    assert channel.end.slot(1)[:2].tolist() == [0, 0]
    channel.end.close()
    assert "closed" in await channel.ended()


@pytest.mark.parametrize("pieces", [[9], [5, 4], [CHUNK_BYTES + 1], [0]], ids="longer over large empty".split())
async def test_what_is_no_part_of_the_expected_frame_breaks_the_channel(pieces: list[int]) -> None:
    channel = GrpcEnd()
    await channel.open(deadline_s=30.0)
    channel.end.start(0, 8 if max(pieces) < CHUNK_BYTES else 2 * CHUNK_BYTES)
    for piece in pieces:
        channel.say(pb.DataChunk(data=bytes(piece)))
    with pytest.raises(ChannelBroken, match="frame 0 of"):
        await channel.finish(0)
    assert "frame 0 of" in await channel.ended()
    with pytest.raises(ChannelBroken):
        channel.end.start(1, 8)


async def test_a_frame_that_stays_short_ends_by_the_deadline() -> None:
    channel = GrpcEnd()
    await channel.open(deadline_s=0.2)
    channel.end.start(0, 8)
    channel.say(pb.DataChunk(data=bytes(7)))
    with pytest.raises(ChannelBroken, match="no progress"):
        await channel.finish(0)
    assert "closed" in await channel.ended()


async def test_what_was_whole_before_the_stream_ended_is_had_and_no_more() -> None:
    channel = GrpcEnd()
    await channel.open()
    channel.end.start(0, 2)
    channel.end.start(1, 2)
    for piece in (b"ab", b"c"):
        channel.say(pb.DataChunk(data=piece))
    channel.say(None)
    assert await channel.ended() == ""
    channel.end.finish(0)
    with pytest.raises(ChannelBroken, match="closed by the other end"):
        channel.end.finish(1)


async def test_a_cut_call_is_seen_at_once() -> None:
    channel = GrpcEnd()
    await channel.open(deadline_s=30.0)
    channel.end.start(0, 2)
    waiting = asyncio.create_task(channel.finish(0))
    channel.call.cancel()
    with pytest.raises(ChannelBroken, match="cut"):
        await asyncio.wait_for(waiting, scaled(5))


@pytest.mark.parametrize("ticket", ["", "of nobody"])
async def test_an_unknown_ticket_ends_the_call_and_nothing_else(ticket: str) -> None:
    channel = GrpcEnd()
    await channel.open()
    stranger = Chunks()
    stranger.queue.put_nowait(pb.DataChunk(ticket=ticket, data=b"x" * 100))
    with pytest.raises(ChannelBroken, match="ticket"):
        await channel.transport.take(stranger)
    again = Chunks()
    again.queue.put_nowait(pb.DataChunk(ticket=channel.ticket))
    with pytest.raises(ChannelBroken, match="ticket"):  # one is good for one call
        await channel.transport.take(again)
    channel.end.start(0, 2)
    channel.say(pb.DataChunk(data=b"ok"))
    await channel.finish(0)
    channel.end.close()
    await channel.ended()


async def test_the_ticket_of_an_end_that_gave_up_is_unknown() -> None:
    transport, told = GrpcTransport("decode:1"), KeyRelay(lambda key, value: None)
    with pytest.raises(ChannelBroken, match="not built"):
        await asyncio.to_thread(transport.open, NAME, Side.RECEIVER, KeyRelay(told.deliver), RING, 0.05)
    key, late = told.receive(5.0), Chunks()
    assert key is not None
    late.queue.put_nowait(pb.DataChunk(ticket=key[1].decode().split()[0]))
    with pytest.raises(ChannelBroken, match="no channel here waits"):
        await transport.take(late)


async def test_a_call_without_a_ticket_ends(monkeypatch) -> None:
    monkeypatch.setattr(grpc_bytes, "_TICKET_S", 0.05)
    silent, empty = Chunks(), Chunks()
    empty.queue.put_nowait(None)
    for chunks in (silent, empty):
        with pytest.raises(ChannelBroken, match="no ticket"):
            await GrpcTransport("decode:1").take(chunks)


def test_a_sender_is_not_kept_by_an_address_where_nobody_is() -> None:
    keys = KeyRelay(lambda key, value: None)
    keys.deliver("grpc", b"ticket 127.0.0.1:1")
    before = threading.active_count()
    with pytest.raises(ChannelBroken, match="not built"):
        GrpcTransport().open(NAME, Side.SENDER, keys, RING, 0.5)
    assert settled(lambda: threading.active_count() <= before)
