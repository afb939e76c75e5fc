"""Service Worker over real gRPC, with a role that only remembers: who is let in, what is said, and how it ends."""

import asyncio
import threading
from typing import Any, cast

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError

from baton.clock import FakeClock
from baton.core import PROTOCOL_VERSION, HandoffId, Incarnation, Role
from baton.errors import InvalidRequest
from baton.rpc import convert
from baton.rpc.channel import aio_channel, aio_server, bind
from baton.rpc.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.worker import events
from baton.worker.loop import EngineLoop
from baton.worker.service import WorkerService
from decode_workers.role import DecodeRole
from prefill_workers.role import PrefillRole
from tests.support.time_factor import scaled
from tests.unit.worker.pusher import P
from tests.unit.worker.support import D, Records, engine_of, info_of, malformed, release, reserve

H = HandoffId("r", 1)
CONNECT = "/baton.v1.Worker/Connect"


class FakeRole:
    """Remembers, on the engine thread, and tells the test's event loop."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self.threads = set()

    def command(self, session, command):
        self._tell(("command", session, command))
        if command.HasField("fence"):
            raise InvalidRequest.of("handoff", "is not one")

    def gone(self, session):
        self._tell(("gone", session, None))

    def stepped(self, result):
        pass

    def tick(self):
        pass

    def _tell(self, what):
        self.threads.add(threading.current_thread().name)
        self.loop.call_soon_threadsafe(self.heard.put_nowait, what)

    async def next(self):
        async with asyncio.timeout(scaled(10)):
            return await self.heard.get()


class Worker:
    """A listening worker."""

    def __init__(self, role, engine, hello_s=10.0):
        self.role = role
        self.info = info_of(D, Role.DECODE, engine)
        self.loop = EngineLoop(engine, idle_s=0.01)
        self.server = aio_server()
        load = common_pb2.Load(step=3)
        self.service = WorkerService(self.info, self.loop, role, lambda: load, hello_s=hello_s)
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
        assert (await read(call)).events[0].HasField("welcome")
        return call


@pytest.fixture
async def worker():
    async with Worker(FakeRole(), engine_of(Role.DECODE, 10)) as made:
        yield made


def hello(router_id="router-a", incarnation=D.incarnation, version=PROTOCOL_VERSION):
    said = worker_pb2.RouterHello(
        router_id=router_id, protocol_version=version, worker=convert.incarnation_to_pb(incarnation)
    )
    return worker_pb2.RouterMessage(commands=[worker_pb2.RouterCommand(hello=said)])


def saying(*commands):
    return worker_pb2.RouterMessage(commands=commands)


async def read(call):
    async with asyncio.timeout(scaled(10)):
        return await call.read()


async def refusal(call):
    """The status with which the worker ends the call."""
    async with asyncio.timeout(scaled(10)):
        return await call.code(), await call.details()


async def test_a_welcome_says_who_this_is_and_how_loaded(worker):
    call = worker.call()
    await call.write(hello())
    message = await read(call)
    assert convert.info_from_pb(message.events[0].welcome) == worker.info
    assert message.load.step == 3


@pytest.mark.parametrize(
    ("first", "code", "named"),
    [
        (hello(incarnation=Incarnation(7, 1)), StatusCode.FAILED_PRECONDITION, "decode-0@7.2, not the worker you mean"),
        (hello(incarnation=Incarnation(8, 2)), StatusCode.FAILED_PRECONDITION, "not the worker you mean"),
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


async def test_who_says_nothing_is_not_waited_for():
    async with Worker(FakeRole(), engine_of(Role.DECODE, 10), hello_s=0.05) as worker:
        call = worker.call()
        code, _ = await refusal(call)
        assert code is StatusCode.INVALID_ARGUMENT


async def test_who_ends_before_the_greeting_is_refused(worker):
    call = worker.call()
    await call.done_writing()
    assert (await refusal(call))[0] is StatusCode.INVALID_ARGUMENT


async def test_commands_reach_the_role_in_order_on_the_engine_thread(worker):
    call = await worker.joined()
    attempts = list(range(1, 31))
    for i in range(0, 30, 10):
        await call.write(saying(*(release(HandoffId("r", a)) for a in attempts[i : i + 10])))
    heard = [await worker.role.next() for _ in attempts]
    assert [command.release.handoff.attempt for _, _, command in heard] == attempts
    assert len({session for _, session, _ in heard}) == 1
    assert worker.role.threads == {"engine"}


async def test_each_router_has_a_session_of_its_own(worker):
    a, b = await worker.joined("router-a"), await worker.joined("router-b")
    await a.write(saying(release(HandoffId("a", 1))))
    _, session_a, _ = await worker.role.next()
    await b.write(saying(release(HandoffId("b", 1))))
    _, session_b, _ = await worker.role.next()
    assert (session_a.router_id, session_b.router_id) == ("router-a", "router-b")
    session_b.emit([events.fenced(HandoffId("b", 1))])
    session_a.emit([events.fenced(HandoffId("a", 1))])
    assert (await read(a)).events[0].handoff.request_id == "a"
    assert (await read(b)).events[0].handoff.request_id == "b"
    worker.service.beat()
    for call in (a, b):
        message = await read(call)
        assert (len(message.events), message.load.step) == (0, 3)


@pytest.mark.parametrize("how", ["cancel", "half close", "bytes that are no message", "channel"])
async def test_the_end_of_the_stream_is_told_once_and_last(worker, how):
    if how == "bytes that are no message":
        raw = worker.channel.stream_stream(CONNECT, request_serializer=lambda data: data)
        call = raw()
        await call.write(hello().SerializeToString())
        await read(call)
        await call.write(saying(release()).SerializeToString())
        await call.write(b"\xff\xff\xff")
    else:
        call = await worker.joined()
        await call.write(saying(release()))
    kind, session, _ = await worker.role.next()
    assert kind == "command"
    if how == "cancel":
        call.cancel()
    elif how == "half close":
        await call.done_writing()
    elif how == "channel":
        await worker.channel.close()
    assert await worker.role.next() == ("gone", session, None)
    assert worker.service.sessions == set()
    session.emit([events.fenced(H)])  # a step that was under way: harmless
    assert worker.role.heard.empty()


async def test_a_router_that_does_not_read_is_noticed_when_it_leaves(worker):
    call = await worker.joined()
    await call.write(saying(release()))
    _, session, _ = await worker.role.next()
    for _ in range(40):  # far more than a flow control window: the worker's write is blocked now
        session.emit([events.preempted(H, "x" * 500_000)])
        await asyncio.sleep(0)
    call.cancel()
    assert (await worker.role.next())[0] == "gone"


async def test_a_refused_command_is_answered_and_the_stream_goes_on(worker):
    call = await worker.joined()
    bad = worker_pb2.RouterCommand(fence=worker_pb2.Fence(handoff=convert.handoff_to_pb(H)))
    await call.write(saying(bad, release()))
    message = await read(call)
    assert message.events[0].refused.reason == worker_pb2.REFUSAL_REASON_INVALID
    assert convert.handoff_from_pb(message.events[0].handoff) == H
    assert "handoff: is not one" in message.events[0].refused.detail
    assert [(await worker.role.next())[2].WhichOneof("command") for _ in range(2)] == ["fence", "release"]
    assert worker.loop.failure is None


@pytest.mark.parametrize("role", list(Role))
async def test_malformed_commands_of_every_kind_leave_a_real_worker_alive(role):
    engine, clock = engine_of(role, 20), FakeClock()
    lazy: Any = Lazy()
    made: DecodeRole | PrefillRole
    if role is Role.DECODE:
        made = DecodeRole(info_of(D, role, engine), engine, lazy, cast(Any, Records()), clock)
    else:
        made = PrefillRole(info_of(P, role, engine), engine, lazy, clock)
    async with Worker(made, engine) as worker:
        lazy.loop = worker.loop
        call = await worker.joined()
        for _, command, _ in malformed():
            await call.write(saying(command))
        await call.write(saying(reserve(HandoffId("good", 1))))
        seen: list[worker_pb2.WorkerEvent] = []
        while not seen or seen[-1].handoff.request_id != "good":
            seen += (await read(call)).events
        assert worker.loop.failure is None
        wanted = "reserved" if role is Role.DECODE else "refused"
        assert seen[-1].WhichOneof("event") == wanted
        assert {event.WhichOneof("event") for event in seen[:-1]} == {"refused"}
        assert "release" not in {event.WhichOneof("event") for event in seen}


class Lazy:
    """The loop of a role that is made before its worker."""

    step_began = 0.0

    loop: EngineLoop

    def submit(self, job):
        self.loop.submit(job)


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


async def test_a_stop_of_the_server_ends_every_stream(worker):
    call = await worker.joined()
    await worker.server.stop(None)
    with pytest.raises(AioRpcError):
        await read(call)
    assert (await worker.role.next())[0] == "gone"
