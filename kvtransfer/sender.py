"""The prefill worker's end: takes pushes, gives each to the link of its destination, reports each exactly once.

    push -> Link (one per destination incarnation and generation) -> on_done
A link is one channel: a Peer stream, a data channel, one thread, one queue. One that broke is never mended: the next
push to that worker makes a new one, with the next generation.
"""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import structlog

from baton.core import PROTOCOL_VERSION, HandoffId, WorkerRef
from baton.errors import ChannelBroken, HandoffError
from baton.rpc import convert
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.handoff import PushJob, PushResult, TransferSettings
from kvtransfer.outbox import Outbox, Push, Report
from kvtransfer.stream import Connect, GrpcPeerStream, PeerStream
from kvtransfer.torch_dist import make_transport
from kvtransfer.transport import ChannelEnd, ChannelName, Endpoint, KeyRelay, Side, Transport, wire_digest

if TYPE_CHECKING:
    from torch import Tensor

    from baton.engine.kv import KVCache

log = structlog.get_logger()
LOOKS = 16  # at the answers that are due, per deadline


class Sender:
    """Pushes KV out of `kv`. Thread-safe.

    `on_done` is called exactly once per push, from one thread of the sender's; from then on nothing reads the push's
    blocks. `transport` and `connect` are for workers that share a process, and for tests.
    """

    def __init__(
        self,
        kv: KVCache,
        me: WorkerRef,
        fingerprint: str,
        settings: TransferSettings,
        on_done: Report,
        *,
        transport: Transport | None = None,
        connect: Connect = GrpcPeerStream,
    ) -> None:
        self._end = Endpoint(kv, me, fingerprint, settings, transport or make_transport(settings, kv.device))
        self._connect = connect
        self._on_done = on_done
        self._lock = threading.Lock()
        self._links: list[Link] = []  # least recently used first; broken ones stay until their thread has ended
        self._generations = itertools.count(1)
        self._closed = threading.Event()
        self._reports = ThreadPoolExecutor(1, thread_name_prefix="kv-reports")
        self._watch = threading.Thread(target=self._watch_deadlines, name="kv-deadlines", daemon=True)
        self._watch.start()

    def push(self, job: PushJob) -> None:
        """Start a handoff; returns at once. The blocks must stay as they are until `on_done`.

        Raises ValueError for a job that contradicts itself or is under way already, ChannelBroken after `close`;
        `on_done` is not called then.
        """
        blocks = self._end.kv.layout.blocks_for(job.known_tokens)
        if not 1 <= blocks <= len(job.blocks) or len(job.spec) != job.known_tokens + 1:
            raise ValueError(
                f"push {job.handoff}: {job.known_tokens} positions need {blocks} blocks and a spec of one token more,"
                f" got {len(job.blocks)} and {len(job.spec)}"
            )
        while not self._link_to(job.to).outbox.add(job):
            pass  # it broke in between; the next one is new

    def warm(self, to: WorkerRef) -> None:
        """Start to build the channel to `to`, unless it is there: the first push will not wait for it.

        Returns at once. A channel that cannot be built is reported by the push that needs it. Raises ChannelBroken
        after `close`.
        """
        self._link_to(to)

    def abort(self, handoff: HandoffId) -> None:
        """Give a push up, in whatever state: `on_done` follows soon, with StaleAttempt. Unknown: no-op."""
        for link in self._all():
            link.outbox.abort(handoff)

    def close(self) -> None:
        """End all pushes with ChannelBroken and free everything. Returns after the last `on_done`."""
        with self._lock:
            self._closed.set()
        for link in self._all():
            link.stop("the sender was closed")
        for link in self._all():
            link.join()
        self._watch.join()
        self._reports.shutdown()

    def _all(self) -> list[Link]:
        with self._lock:
            return list(self._links)

    def _link_to(self, to: WorkerRef) -> Link:
        with self._lock:
            if self._closed.is_set():
                raise ChannelBroken("the sender was closed")
            self._links = [link for link in self._links if link.running]
            link = next((link for link in self._links if link.to == to and not link.outbox.broken), None)
            if link is None:
                self._retire_idle()
                link = Link(self._end, self._connect, to, next(self._generations), self._report)
            else:
                self._links.remove(link)
            self._links.append(link)
            return link

    def _retire_idle(self) -> None:
        idle = [link for link in self._links if link.outbox.idle]
        for link in idle[: max(0, len(idle) + 1 - self._end.settings.idle_channels)]:
            link.outbox.retire()

    def _watch_deadlines(self) -> None:
        """A thread of its own: the links' threads may each be held up by the wire for a whole deadline."""
        while not self._closed.wait(self._end.settings.frame_deadline_s / LOOKS):
            for link in self._all():
                link.outbox.expire()

    def _report(self, handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        self._reports.submit(self._deliver, handoff, outcome)

    def _deliver(self, handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        try:
            self._on_done(handoff, outcome)
        except Exception:  # the boundary to the worker: one bad callback must not cost the others theirs
            log.exception("on_done failed", handoff=str(handoff))


class Link:
    """Runs from the start until it breaks, which is final. The state of its pushes is in `outbox`."""

    def __init__(self, end: Endpoint, connect: Connect, to: WorkerRef, generation: int, report: Report) -> None:
        self.to = to
        self._end = end
        self._connect = connect
        self._name = ChannelName(end.me.incarnation, to.incarnation, generation)
        self._keys = KeyRelay(lambda key, value: self._say(pb.PeerCommand(store_key=pb.StoreKey(key=key, value=value))))
        self.outbox = Outbox(end, f"channel {self._name} to {to}", self._say, self._keys, report)
        self._stream: PeerStream | None = None
        self._thread = threading.Thread(target=self._run, name=f"kv-send-{self._name}", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def stop(self, why: str) -> None:
        """Break the link, from any thread."""
        self.outbox.stop(ChannelBroken(f"channel {self._name} to {self.to}: {why}"))

    def join(self) -> None:
        """Wait for the thread: at most the deadline of what is on the wire."""
        self._thread.join()

    def _run(self) -> None:
        with ExitStack() as leaving:
            try:
                self._serve(leaving)
            except HandoffError as error:
                self.outbox.stop(error)
                log.info("channel closed", channel=str(self._name), why=str(error))
            except Exception as error:  # the boundary of this thread: whatever it is, every push gets its report
                self.stop(f"{type(error).__name__}: {error}")
                log.exception("channel failed", channel=str(self._name))

    def _serve(self, leaving: ExitStack) -> None:
        started, transport, deadline_s = time.monotonic(), self._end.transport, self._end.settings.frame_deadline_s
        self._stream = self._connect(self.to.address, self.outbox.take, self.stop)
        leaving.callback(self._stream.close)
        self._say(pb.PeerCommand(hello=self._hello()))
        staging = self._end.staging(self.outbox.welcome().frame_size)
        channel = transport.open(self._name, Side.SENDER, self._keys, deadline_s)
        leaving.callback(channel.close)
        took_ms = round((time.monotonic() - started) * 1e3, 1)
        log.info("channel open", to=str(self.to), channel=str(self._name), transport=transport.name, ms=took_ms)
        while True:
            self._transfer(channel, staging, self.outbox.next())

    def _hello(self) -> pb.PeerHello:
        return pb.PeerHello(
            protocol_version=PROTOCOL_VERSION,
            sender=convert.ref_to_pb(self._end.me),
            receiver=convert.ref_to_pb(self.to),
            transport=self._end.transport.name,
            generation=self._name.generation,
            fingerprint=self._end.fingerprint,
            layout=convert.layout_to_pb(self._end.kv.layout),
        )

    def _transfer(self, channel: ChannelEnd, staging: Tensor, push: Push) -> None:
        for index, frame in enumerate(push.plan):
            data = staging[: frame.nbytes]
            if not self._read(push, index, data) or not self.outbox.announce(push, index):
                return  # it ended meanwhile, and has its report
            channel.send(data)
        self.outbox.commit(push)

    def _read(self, push: Push, index: int, data: Tensor) -> bool:
        frame = push.plan[index]
        with self.outbox.reading(push) as allowed:
            if allowed:
                self._end.kv.gather(frame.layers, push.job.blocks[frame.blocks], data)
                push.digests.append(wire_digest(data))  # on a GPU, this also waits until the blocks have been read
        return allowed

    def _say(self, command: pb.PeerCommand) -> None:
        if self._stream is not None:
            self._stream.send(command)
