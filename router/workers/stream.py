"""Worker streams: one gRPC stream to each worker, with commands down and events up, shared by all requests.

The reader puts each event into the mailbox of its handoff and never waits for a request. The end of a stream means that
the worker is lost: its requests are notified, and the stream reconnects until it is stopped.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import NoReturn

import grpc
import structlog
from google.protobuf.message import Message
from grpc import aio

from baton.core import PROTOCOL_VERSION, HandoffId, Role, WorkerInfo
from baton.errors import BatonError, EngineFault, InvalidRequest, WorkerLost
from baton.rpc import convert, message_size
from baton.rpc.channel import Wire, aio_channel
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import worker_pb2 as pb
from baton.rpc.v1.worker_pb2_grpc import WorkerStub
from router.placement.snapshot import WorkerView
from router.workers.stream_timers import WakeupBatcher, silence

log = structlog.get_logger(__name__)

_Call = aio.StreamStreamCall[pb.RouterMessage, pb.WorkerMessage]
_MOST_LATE = 1024  # ended attempts with an outstanding report, or with a Release for the next connect
_LAST = ("pushed", "failed", "refused", "finish")  # the last event of a handoff from a prefill worker
_BACKOFF_S = (0.1, 3.0)  # first and longest pause between connects, with jitter
Item = pb.WorkerEvent | BatonError  # an event of a worker, or the error that ended its stream
Late = Callable[[Role, str, pb.WorkerEvent], None]  # receives an event with the role and the id of its worker


class WorkerLeft(WorkerLost):
    """The worker ended its stream in order. It had answered all commands that it received, so it is no failure."""


class EventMailbox:
    """The events of one handoff's workers in order of arrival, each with the sender's role. It holds at most `limit`
    events, the maximum that a request can produce. A worker that sends more is faulty.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: list[tuple[Role, Item]] = []
        self._woken = False
        self._reader: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()  # cached, because looking it up is a system call
        self._newest_at = 0.0  # when the last item was added
        self.lag_s = 0.0  # from then on until its reader had it

    def put(self, source: Role, item: Item) -> None:
        self.add(source, item)
        self.wake()

    def left(self) -> list[tuple[Role, pb.WorkerEvent]]:
        """Return the events that the reader has not drained, at its end."""
        items, self._items = self._items, []
        return [(source, item) for source, item in items if isinstance(item, pb.WorkerEvent)]

    def add(self, source: Role, item: Item) -> None:
        """Add an item that the reader gets after `wake`. Never blocks."""
        if len(self._items) >= self._limit:
            item = EngineFault(f"the {source} worker sent more than {self._limit} messages for one request")
            self._items = []
        self._items.append((source, item))
        self._newest_at = self._loop.time()

    def wake(self) -> None:
        self._woken = bool(self._items)
        if self._woken and self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def drain(self) -> list[tuple[Role, Item]]:
        """Return all items, and wait for the first. Only one reader is allowed."""
        if not self._woken:
            self._reader = self._loop.create_future()
            await self._reader
        items, self._items, self._woken = self._items, [], False
        self.lag_s = self._loop.time() - self._newest_at
        return items


class WorkerStream:
    """The stream to one incarnation of a worker, until `stop`. Policies read its `view`. A worker reports its load at
    each heartbeat. The stream is closed after `silence_s` seconds without a message.
    """

    def __init__(
        self, info: WorkerInfo, router_id: str, silence_s: float, on_change: Callable[[], None], wire: Wire
    ) -> None:
        self.view = WorkerView(info)
        self.state = "connecting"  # connecting | connected | lost
        self.retired = False  # no longer in the ledger: takes no new requests
        self.foreign = False  # of a model with other tokens: takes no requests
        self.settled = asyncio.Event()  # set after the first connect or failure
        self._router_id, self._silence_s = router_id, silence_s
        self._on_change, self._wire = on_change, wire
        self.mailboxes: dict[HandoffId, tuple[EventMailbox, Role]] = {}
        self._late: dict[HandoffId, Late] = {}
        self._commands: list[pb.RouterCommand] = []
        self._wake = asyncio.Event()
        self._report: common_pb2.Load | None = None  # the last one not read yet
        self._updating = False
        self._fault: InvalidRequest | None = None  # an invalid message of the worker
        self._loop = asyncio.get_running_loop()
        self._rounds = WakeupBatcher(self._loop)
        self._task = asyncio.create_task(self._run(), name=f"link {info.ref}")

    @property
    def info(self) -> WorkerInfo:
        return self.view.info

    @property
    def usable(self) -> bool:
        return self.state == "connected" and not (self.retired or self.foreign or self.view.load.draining)

    async def stop(self) -> None:
        """Close the stream. Its requests get WorkerLost."""
        self._task.cancel()
        await asyncio.wait([self._task])

    def open(self, handoff: HandoffId, mailbox: EventMailbox, part: Role) -> None:
        """Send events of `handoff` to `mailbox`, which immediately gets WorkerLost if the worker is not connected. A
        decode worker has the `part` of a prefill worker while it moves a sequence to another one.
        """
        self.mailboxes[handoff] = mailbox, part
        if self.state != "connected":
            mailbox.put(part, self._lost("is not connected"))

    def close(self, handoff: HandoffId, late: Late | None = None) -> None:
        """Drop further events of `handoff`. If given, `late` gets the last one, for its spans."""
        self.mailboxes.pop(handoff, None)
        if late is not None:
            self._late[handoff] = late
            if len(self._late) > _MOST_LATE:
                del self._late[next(iter(self._late))]

    def send(self, **command: Message) -> None:
        """Queue a command, named by its field in `RouterCommand`. Those queued before the next write share a message.
        While not connected, only a Release is kept: a worker aborts all requests of a router whose stream ends, except
        those that can be resumed.
        """
        if self.state == "connected" or "release" in command:
            self._commands.append(pb.RouterCommand(**command))  # type: ignore[arg-type]
            self._wake.set()

    async def _run(self) -> None:
        pause = _BACKOFF_S[0]
        while True:
            left = False
            try:
                await self._session()
            except (Exception, asyncio.CancelledError) as error:  # the task must outlive any failure of a stream
                if (task := asyncio.current_task()) and task.cancelling():
                    raise  # a stop of this task; a cancelled call is a lost stream instead
                silent = f"silent for {self._silence_s:g} s"
                reason = silent if isinstance(error, TimeoutError) else _why(self._fault or error)
                left = isinstance(error, WorkerLeft) and self._fault is None
            finally:
                connected, self.state = self.state == "connected", "lost"
                self.settled.set()
                for mailbox, part in self.mailboxes.values():
                    mailbox.put(part, self._lost("left", WorkerLeft) if left else self._lost("was lost"))
                self._on_change()
            log.warning("worker_lost" if connected else "worker_unreachable", worker=self.info.ref, reason=reason)
            pause = _BACKOFF_S[0] if connected else min(2 * pause, _BACKOFF_S[1])
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _session(self) -> NoReturn:
        wire = self._wire
        async with aio_channel(self.info.ref.address, credentials=wire.credentials, name=wire.name) as channel:
            call: _Call = WorkerStub(channel).Connect()
            releases = [command for command in self._commands if command.HasField("release")]
            self._commands, self._report, self._fault = releases[-_MOST_LATE:], None, None
            worker = convert.incarnation_to_pb(self.info.ref.incarnation)
            hello = pb.RouterHello(router_id=self._router_id, protocol_version=PROTOCOL_VERSION, worker=worker)
            await call.write(pb.RouterMessage(commands=[pb.RouterCommand(hello=hello)]))
            await self._listen(call)

    async def _listen(self, call: _Call) -> NoReturn:
        async with silence(self._silence_s) as heard:
            self._on_welcome(await self._read(call))
            writer = asyncio.create_task(self._write(call), name=f"write {self.info.ref}")
            try:
                while True:
                    heard()
                    self._dispatch(await self._read(call))
            finally:
                writer.cancel()
                call.cancel()

    async def _read(self, call: _Call) -> pb.WorkerMessage:
        message = await call.read()
        if not isinstance(message, pb.WorkerMessage):
            kind = WorkerLeft if (code := await call.code()) is grpc.StatusCode.OK else WorkerLost
            raise kind(f"ended the stream: {code} {await call.details()}".rstrip())
        return message

    async def _write(self, call: _Call) -> None:
        commands: list[pb.RouterCommand] = []
        try:
            while self._fault is None:
                await self._wake.wait()
                self._wake.clear()
                commands, self._commands = self._commands, []
                for part in message_size.within([command] for command in commands):
                    await call.write(pb.RouterMessage(commands=part))
                commands = []
        except (aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):  # the reader gets the reason
            self._commands[:0] = commands  # the next session sends the releases, perhaps again
            if commands:
                self._wake.set()
        finally:
            call.cancel()  # a stream needs a writer

    def _on_welcome(self, message: pb.WorkerMessage) -> None:
        if not message.events or message.events[0].WhichOneof("event") != "welcome":
            raise InvalidRequest.of("welcome", "must be the first message of a worker")
        info, expected = convert.info_from_pb(message.events[0].welcome), self.info
        if (str(info.ref), info.role) != (str(expected.ref), expected.role):  # the address may differ
            raise InvalidRequest.of("welcome.info", f"is that of {info.role} {info.ref}, must be of {expected.ref}")
        self.view = WorkerView(info)
        self.state = "connected"
        self.settled.set()
        log.info("worker_connected", worker=info.ref, role=info.role.value)
        self._dispatch(message)

    def _dispatch(self, message: pb.WorkerMessage) -> None:
        """Deliver events first; update scheduling state only after the waiting requests have run."""
        if message.HasField("load"):
            self._report, self.view.full = message.load, False
        holds = self._rounds.holds()
        for event in message.events:
            handoff = event.handoff
            name = HandoffId(handoff.request_id, handoff.attempt)
            if (taker := self.mailboxes.get(name)) is not None:
                self._deliver(event, *taker, holds)
            elif name in self._late and event.WhichOneof("event") in _LAST:
                self._late.pop(name)(self.info.role, self.info.ref.worker_id, event)
            if event.HasField("refused"):
                self.view.full = self.view.full or event.refused.reason == pb.REFUSAL_REASON_NO_ROOM
                self.retired = self.retired or event.refused.reason == pb.REFUSAL_REASON_DRAINING
        if not self._updating:
            self._updating = True
            self._loop.call_soon(self._loop.call_soon, self._update_load)

    def _update_load(self) -> None:
        self._updating = False
        report, self._report = self._report, None
        try:
            if report is not None:
                self.view.load = convert.load_from_pb(report)
        except InvalidRequest as error:
            self._fault = error
            self._wake.set()
        self._on_change()

    def _deliver(self, event: pb.WorkerEvent, mailbox: EventMailbox, part: Role, holds: bool) -> None:
        if holds and getattr(event.tokens, "from"):  # only tokens after the first one are delayed
            mailbox.add(part, event)
            self._rounds.later(mailbox)
        else:
            mailbox.put(part, event)

    def _lost(self, what: str, kind: type[WorkerLost] = WorkerLost) -> WorkerLost:
        return kind(f"the {self.info.role} worker {self.info.ref.worker_id} {what}")


def _why(error: BaseException) -> str:
    if isinstance(error, aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) if isinstance(error, BatonError) else repr(error)
