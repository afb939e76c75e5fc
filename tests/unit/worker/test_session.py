"""A router's stream as the roles see it: events gather and are sent together."""

import asyncio
import threading

import pytest

from baton.core import HandoffId
from baton.errors import EngineFault
from baton.rpc.v1 import common_pb2
from baton.worker import events
from baton.worker.service import Session


def made(load=lambda: common_pb2.Load(step=3)):
    return Session("router-a", asyncio.get_running_loop(), load)


@pytest.fixture
async def session():
    return made()


def event(number, request="r"):
    return events.failed(HandoffId(request, number + 1), EngineFault("x"))


async def test_the_events_of_one_step_leave_as_one_message_with_the_load_of_that_moment():
    steps = iter([3, 4, 5, 6])
    session = made(lambda: common_pb2.Load(step=next(steps)))
    session.emit([event(0), event(1)])
    session.emit([event(2)])
    message = await session.next_message()
    assert ([e.handoff.attempt for e in message.events], message.load.step) == ([1, 2, 3], 3)
    session.emit([event(3)])
    message = await session.next_message()
    assert ([e.handoff.attempt for e in message.events], message.load.step) == ([4], 4)
    session.beat()
    message = await session.next_message()
    assert (len(message.events), message.load.step) == (0, 5), "a beat is a load report without events"
    waiting = asyncio.create_task(session.next_message())
    await asyncio.sleep(0)
    assert not waiting.done()
    session.beat()
    assert (await waiting).load.step == 6


async def test_close_ends_the_stream_and_drops_what_is_pending(session):
    session.emit([event(0)])
    session.close()
    session.close()
    assert await session.next_message() is None
    session.emit([event(1)])
    session.beat()
    assert await session.next_message() is None


async def test_close_wakes_a_reader_from_another_thread(session):
    reader = asyncio.create_task(session.next_message())
    await asyncio.sleep(0)
    thread = threading.Thread(target=session.close)
    thread.start()
    assert await reader is None
    thread.join()


async def test_nothing_is_lost_or_reordered_between_threads(session):
    count, per_thread = 6, 300

    def work(name):
        for number in range(per_thread):
            session.emit([event(number, f"t{name}")])

    threads = [threading.Thread(target=work, args=(name,)) for name in range(count)]
    for thread in threads:
        thread.start()
    seen: dict[str, list[int]] = {f"t{name}": [] for name in range(count)}
    while sum(map(len, seen.values())) < count * per_thread:
        for item in (await session.next_message()).events:
            seen[item.handoff.request_id].append(item.handoff.attempt)
    assert all(order == list(range(1, per_thread + 1)) for order in seen.values())
    for thread in threads:
        thread.join()


def test_emit_after_the_event_loop_has_ended_is_harmless():
    async def main():
        return made()

    session = asyncio.run(main())
    session.emit([event(0)])
    session.close()
