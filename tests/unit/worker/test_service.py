"""The Worker service over real gRPC: handshake, messages and end of a stream. Malformed commands change nothing.

A session by itself gathers events and sends them together.
"""

import asyncio
import threading
from typing import Any, cast

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError

from baton.core import PROTOCOL_VERSION, HandoffId, Incarnation, Role
from baton.errors import EngineFault, InvalidRequest
from baton.rpc import convert, message_size
from baton.rpc.channel import aio_channel, aio_server, bind
from baton.rpc.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.rpc.v1 import worker_pb2 as pb
from baton.worker import events
from baton.worker.engine_loop import EngineLoop
from baton.worker.service import Session, WorkerService
from tests.support.sessions import D, H, fence, malformed, prefill, release, reserve
from tests.support.workers import DecodeSide, PrefillSide, engine_of, info_of

CONNECT = "/baton.v1.Worker/Connect"


class FakeRole:
    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self.next = self.heard.get
        self.threads = set()

    def command(self, session, command):
        self._tell(("command", session, command))
        if command.HasField("fence"):
            raise InvalidRequest.of("handoff", "is not one")

    def gone(self, session):
        self._tell(("gone", session, None))

    def tick(self):
        pass

    def _tell(self, what):
        self.threads.add(threading.current_thread().name)
        self.loop.call_soon_threadsafe(self.heard.put_nowait, what)


class Worker:
    def __init__(self, hello_s=10.0):
        engine = engine_of(Role.DECODE, 10)
        self.role = cast(Any, FakeRole())
        self.info = info_of(D, Role.DECODE, engine)
        self.loop = EngineLoop(engine, idle_s=0.01)
        self.server = aio_server()
        load = common_pb2.Load(step=3)
        self.service = WorkerService(self.info, self.loop, self.role, lambda: load, hello_s=hello_s)
        worker_pb2_grpc.add_WorkerServicer_to_server(self.service, self.server)

    async def __aenter__(self):
        self.address = bind(self.server, "127.0.0.1:0")
        self.loop.start(self.role)
        await self.server.start()
        self.channel = aio_channel(self.address)
        return self

    async def __aexit__(self, *_):
        await self.channel.close()
        await self.server.stop(None)
        self.loop.stop()

    def call(self):
        return worker_pb2_grpc.WorkerStub(self.channel).Connect()

    async def joined(self, router_id="router-a"):
        call = self.call()
        await call.write(hello(router_id))
        message = await call.read()
        assert convert.info_from_pb(message.events[0].welcome) == self.info
        assert message.load.step == 3
        return call

    async def heard(self, call):
        """Return the router's session, after the role has received a command of it."""
        await call.write(saying(release()))
        kind, session, _ = await self.role.next()
        assert kind == "command"
        return session


@pytest.fixture
async def worker():
    async with Worker() as made:
        yield made


def hello(router_id="router-a", incarnation=D.incarnation, version=PROTOCOL_VERSION):
    worker = convert.incarnation_to_pb(incarnation)
    greeting = worker_pb2.RouterHello(router_id=router_id, protocol_version=version, worker=worker)
    return saying(worker_pb2.RouterCommand(hello=greeting))


def saying(*commands):
    return worker_pb2.RouterMessage(commands=commands)


async def refusal(call):
    return await call.code(), await call.details()


@pytest.mark.parametrize(
    ("first", "code", "named"),
    [
        (hello(incarnation=Incarnation(7, 1)), StatusCode.FAILED_PRECONDITION, "decode-0@7.2, not the requested"),
        (hello(incarnation=Incarnation(8, 2)), StatusCode.FAILED_PRECONDITION, "not the requested worker"),
        (hello(version=99), StatusCode.FAILED_PRECONDITION, "protocol_version: 99"),
        (saying(reserve()), StatusCode.INVALID_ARGUMENT, "must be one RouterHello"),
        (saying(), StatusCode.INVALID_ARGUMENT, "must be one RouterHello"),
        (saying(hello().commands[0], reserve()), StatusCode.INVALID_ARGUMENT, "must be one RouterHello"),
    ],
)
async def test_who_does_not_greet_properly_is_not_let_in(worker, first, code, named):
    call = worker.call()
    await call.write(first)
    found, details = await refusal(call)
    assert (found, named in details) == (code, True), details
    assert worker.service.sessions == set()
    assert worker.role.heard.empty()


async def test_who_ends_or_waits_before_the_greeting_is_refused():
    async with Worker(hello_s=0.05) as worker:
        assert (await refusal(worker.call()))[0] is StatusCode.INVALID_ARGUMENT
        call = worker.call()
        await call.done_writing()
        assert (await refusal(call))[0] is StatusCode.INVALID_ARGUMENT


async def test_commands_reach_the_role_in_order_on_the_engine_thread(worker):
    call = await worker.joined()
    for first in (1, 11, 21):
        await call.write(saying(*(release(HandoffId("r", attempt)) for attempt in range(first, first + 10))))
    heard = [await worker.role.next() for _ in range(30)]
    assert [command.release.handoff.attempt for _, _, command in heard] == list(range(1, 31))
    assert len({session for _, session, _ in heard}) == 1
    assert worker.role.threads == {"engine"}


async def test_each_router_has_a_session_of_its_own(worker):
    a, b = await worker.joined("router-a"), await worker.joined("router-b")
    session_a, session_b = await worker.heard(a), await worker.heard(b)
    assert (session_a.router_id, session_b.router_id) == ("router-a", "router-b")
    session_b.emit([events.fenced(HandoffId("b", 1))])
    session_a.emit([events.fenced(HandoffId("a", 1))])
    assert (await a.read()).events[0].handoff.request_id == "a"
    assert (await b.read()).events[0].handoff.request_id == "b"
    worker.service.beat()
    for call in (a, b):
        message = await call.read()
        assert (len(message.events), message.load.step) == (0, 3)


@pytest.mark.parametrize("how", ["cancel", "half close", "bytes that are no message", "channel", "server"])
async def test_the_end_of_the_stream_is_told_once_and_last(worker, how):
    if how == "bytes that are no message":
        raw = worker.channel.stream_stream(CONNECT, request_serializer=lambda data: data)
        call = raw()
        for message in (hello(), saying(release())):
            await call.write(message.SerializeToString())
        _, session, _ = await worker.role.next()
        await call.write(b"\xff\xff\xff")
    else:
        call = await worker.joined()
        session = await worker.heard(call)
    if how == "cancel":
        call.cancel()
    elif how == "half close":
        await call.done_writing()
    elif how == "channel":
        await worker.channel.close()
    elif how == "server":
        await worker.server.stop(None)
        with pytest.raises(AioRpcError):
            await call.read()
    assert await worker.role.next() == ("gone", session, None)
    assert worker.service.sessions == set()
    session.emit([events.fenced(H)])  # by a step in progress: harmless
    assert worker.role.heard.empty()


async def test_a_router_that_does_not_read_is_noticed_when_it_leaves(worker):
    call = await worker.joined()
    session = await worker.heard(call)
    for _ in range(40):  # far more than a flow control window, so that the worker's write blocks
        session.emit([events.preempted(H, "x" * 500_000)])
        await asyncio.sleep(0)
    call.cancel()
    assert (await worker.role.next())[0] == "gone"


async def test_a_refused_command_is_answered_and_the_stream_goes_on(worker):
    call = await worker.joined()
    await call.write(saying(fence(), release()))
    message = await call.read()
    assert message.events[0].refused.reason == worker_pb2.REFUSAL_REASON_INVALID
    assert convert.handoff_from_pb(message.events[0].handoff) == H
    assert "handoff: is not one" in message.events[0].refused.detail
    assert [(await worker.role.next())[2].WhichOneof("command") for _ in range(2)] == ["fence", "release"]
    assert worker.loop.failure is None


async def test_close_tells_of_every_router_at_once_and_only_once(worker):
    calls = [await worker.joined(f"router-{n}") for n in range(3)]
    sessions = set(worker.service.sessions)
    worker.service.close()
    assert worker.service.sessions == set()
    worker.service.close()
    heard = [await worker.role.next() for _ in calls]
    assert {(kind, session) for kind, session, _ in heard} == {("gone", session) for session in sessions}
    for call in calls:
        assert (await refusal(call))[0] is StatusCode.OK
    assert worker.role.heard.empty()


FOREIGN = {PrefillSide: [reserve(), fence()], DecodeSide: [prefill()]}
CASES = [
    pytest.param(side, command, named, id=f"{side.__name__}: {name}")
    for side, foreign in FOREIGN.items()
    for name, command, named in (*malformed(), *(("of the other role", command, "command") for command in foreign))
]


@pytest.mark.parametrize(("make", "command", "named"), CASES)
def test_a_malformed_command_is_refused_and_changes_nothing(router, make, command, named):
    side, kind = make(), command.WhichOneof("command")
    if (make, kind) == (DecodeSide, "prefill"):
        named = f"{named}|to: must not be set for a prefill on a decode worker"
    elif kind in {one.WhichOneof("command") for one in FOREIGN[make]}:
        named = "command"
    with pytest.raises(InvalidRequest, match=named):
        side.role.command(router, command)
    side.serve(router, command)
    assert (side.all_free, side.engine.has_work(), router.handoffs) == (True, False, set())
    if kind in {None, "hello", "release"}:
        assert router.events == [], "no request waits for an answer"
    else:
        (event,) = router.events
        assert event.handoff == getattr(command, kind).handoff
        assert event.refused.reason == pb.REFUSAL_REASON_INVALID


# --- a session by itself


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


async def test_events_that_exceed_a_message_follow_in_the_next(session, monkeypatch):
    """Those of one emit share a message, unless they exceed one by themselves."""
    most = 3 * event(0).ByteSize()
    monkeypatch.setattr(message_size, "MESSAGE_BYTES", most)
    numbers = iter(range(15))
    for count in (2, 1, 2, 2, 7, 1):
        session.emit([event(next(numbers)) for _ in range(count)])
    session.finish()
    parts = []
    while (message := await session.next_message()) is not None:
        assert (sum(each.ByteSize() for each in message.events) <= most, message.load.step) == (True, 3)
        parts.append([each.handoff.attempt - 1 for each in message.events])
    assert parts == [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9, 10], [11, 12, 13], [14]]


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
