"""The sending side of KV transfer: `Sender` accepts pushes and reports the outcome of each exactly once.

    begin, computed ..., finish -> SendChannel (one per destination incarnation and generation) -> on_done
A send channel is one Peer stream, one data channel, one thread and one `SendQueue`. A broken channel is never reused:
the next push to that worker opens a new one, with the next generation. The Peer stream is blocking gRPC, not asyncio:
the thread blocks in the data plane anyway, and replies bypass event loops that serve other calls.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol

import grpc
import structlog

from baton.core import PROTOCOL_VERSION, Channel, HandoffId, LeftOut, WorkerRef
from baton.engine.kv_cache import KVCache
from baton.engine.memory.exposed import pattern
from baton.errors import ChannelBroken, HandoffError
from baton.rpc import convert
from baton.rpc.channel import sync_channel
from baton.rpc.v1 import peer_pb2 as pb
from baton.rpc.v1.peer_pb2_grpc import PeerStub
from kvtransfer import wire
from kvtransfer.frames import FrameSpec, KVDigest, wire_digest
from kvtransfer.handoff import PushEnd, PushJob, PushResult, Reports, TransferSettings
from kvtransfer.send_queue import Push, SendQueue
from kvtransfer.transports.base import PREFERENCE, ChannelEnd, ChannelName, Choice, Endpoint, KeyRelay, Ring, Side

log = structlog.get_logger()

OnReply = Callable[[pb.PeerReply], None]
OnEnd = Callable[[str], None]


class PeerStream(Protocol):
    """A Peer stream: takes commands; replies arrive by callback, in order, from the stream's own thread."""

    def send(self, command: pb.PeerCommand) -> None:
        """Send a command without blocking. Thread-safe and ordered; commands after the end are dropped."""

    def close(self) -> None:
        """Close the stream and wait for its last callback. Idempotent; must not be called from a callback."""


# Opens a stream to an address. OnEnd is called once, after the last reply, with the reason.
Connect = Callable[[str, OnReply, OnEnd], PeerStream]


class GrpcPeerStream:
    """A `PeerStream` over its own gRPC connection, opened by `dial`, so that closing it leaves nothing behind."""

    def __init__(
        self, address: str, on_reply: OnReply, on_end: OnEnd, dial: Callable[[str], grpc.Channel] = sync_channel
    ) -> None:
        self._on_reply = on_reply
        self._on_end = on_end
        self._commands: queue.SimpleQueue[pb.PeerCommand | None] = queue.SimpleQueue()
        self._channel = dial(address)
        self._call = PeerStub(self._channel).Connect(iter(self._commands.get, None))
        self._reader = threading.Thread(target=self._read, name=f"kv-replies-{address}", daemon=True)
        self._reader.start()

    def send(self, command: pb.PeerCommand) -> None:
        self._commands.put(command)

    def close(self) -> None:
        self._commands.put(None)  # ends gRPC's writer thread
        self._call.cancel()
        self._channel.close()
        self._reader.join()

    def _read(self) -> None:
        reason = "the receiver ended the stream"
        try:
            for reply in self._call:
                self._on_reply(reply)
        except grpc.RpcError:
            reason = f"stream failed: {self._call.code()}: {self._call.details()}"
        except Exception as error:  # thread boundary: no push may wait for a stream without a reader
            reason = f"a reply could not be handled: {type(error).__name__}"
            log.exception("channel_stream_failed")
        self._on_end(reason)


LOOKS = 16  # checks for late answers per deadline
REASON_S = 0.2  # seconds to wait for the receiver's own reason if the channel fails first


class Sender:
    """Sender of KV in `kv` to other workers. Thread-safe. `on_done` is called exactly once per push, from one thread of
    the sender; after that, nothing reads the push's blocks. A transport that could not be opened to a worker is the
    last choice for that incarnation of it.
    """

    def __init__(
        self,
        kv: KVCache,
        me: WorkerRef,
        fingerprint: str,
        settings: TransferSettings,
        transports: Choice,
        on_done: Callable[[HandoffId, PushResult | HandoffError], None],
        *,
        on_unfetched: Callable[[HandoffId], None] = lambda handoff: None,  # a fetch was refused; on a channel thread
        connect: Connect = GrpcPeerStream,  # for workers that share a process
    ) -> None:
        self._end = Endpoint(kv, me, fingerprint, settings, transports)
        self._connect = connect
        self._on_done = on_done
        self._callbacks = Reports(self._report, on_unfetched)
        self._lock = threading.Lock()
        self._channels: list[SendChannel] = []  # least recently used first; broken ones stay until their thread ends
        self._failures: dict[str, tuple[WorkerRef, dict[str, str]]] = {}  # by worker: reason of each failed transport
        self._generations = itertools.count(1)
        self._closed = threading.Event()
        self._reports = ThreadPoolExecutor(1, thread_name_prefix="kv-reports")
        self._watch = threading.Thread(target=self._watch_deadlines, name="kv-deadlines", daemon=True)
        self._watch.start()

    def begin(self, job: PushJob) -> None:
        """Start a push without waiting: channel and offer are set up while the prompt is computed. Raises ValueError if
        the job is inconsistent or already under way, ChannelBroken after `close` or without threads; no `on_done` then.
        """
        if not 0 <= job.skip < job.known_tokens:
            raise ValueError(f"push {job.handoff}: {job.skip} of {job.known_tokens} positions are skipped")
        while not self._give(job):
            pass  # the channel broke in between; the next one is new

    def computed(self, handoff: HandoffId, blocks: Sequence[int], layers: int, end: int) -> None:
        """Mark KV of the first `layers` layers as final up to position `end`. `blocks` must not change until `on_done`
        or `withdraw`. No-op if the push is unknown or has ended.
        """
        for channel in self._all():
            channel.queue.computed(handoff, blocks, layers, end)

    def withdraw(self, handoff: HandoffId) -> None:
        """Stop reading blocks that are about to be reused; unsent KV is recomputed. Waits for a read under way."""
        for channel in self._all():
            channel.queue.withdraw(handoff)

    def finish(self, handoff: HandoffId, end: PushEnd) -> None:
        """Commit a push once all its KV is sent. Call it after the last `computed`. No-op if the push has ended."""
        for channel in self._all():
            channel.queue.finish(handoff, end)

    def abort(self, handoff: HandoffId) -> None:
        """Abort a push in any state: `on_done` follows soon, with StaleAttempt. No-op if the push is unknown."""
        for channel in self._all():
            channel.queue.abort(handoff)

    def channels(self) -> tuple[Channel, ...]:
        return tuple(one.channel for one in self._all() if one.channel is not None and one.running)

    def close(self) -> None:
        """End all pushes with ChannelBroken and free everything. Returns after the last `on_done`."""
        with self._lock:
            self._closed.set()
        for channel in self._all():
            channel.stop("the sender was closed")
        for channel in self._all():
            channel.join()
        self._watch.join()
        self._reports.shutdown()

    def _all(self) -> list[SendChannel]:
        with self._lock:
            return list(self._channels)

    def _give(self, job: PushJob) -> bool:
        with self._lock:
            if self._closed.is_set():
                raise ChannelBroken("the sender was closed")
            self._note_failures()
            self._channels = [channel for channel in self._channels if channel.running]
            channel = next((one for one in self._channels if one.to == job.to and not one.queue.broken), None)
            if channel is None:
                self._retire_idle()
                generation = next(self._generations)
                end = replace(self._end, choice=self._choice(job.to))
                try:
                    self._channels.append(SendChannel(end, self._connect, job, generation, self._callbacks))
                except (RuntimeError, OSError) as error:  # there are no more threads or files; the engine goes on
                    raise ChannelBroken(f"no channel to {job.to} can be opened: {error}") from error
                return True
            self._channels.remove(channel)
            self._channels.append(channel)
            return channel.queue.add(job)

    def _choice(self, to: WorkerRef) -> Choice:
        """Return the transports for a channel to this worker. Those that failed there are the last."""
        ours, (known, failed) = self._end.choice, self._failures.get(to.worker_id, (to, {}))
        reasons = [LeftOut(name, "failed", why) for name, why in failed.items() if known == to]
        names = {reason.transport for reason in reasons}
        transports = sorted(ours.transports, key=lambda one: one.name in names)
        return Choice(tuple(transports), (*reasons, *ours.left_out))

    def _note_failures(self) -> None:
        """Record each transport whose channel broke before its probe was acknowledged."""
        for channel in self._channels:
            to, transport, reason = channel.to, channel.queue.opening, channel.queue.broken
            known, failed = self._failures.get(to.worker_id, (to, {}))
            failed = failed if known == to else {}
            if transport and reason and transport not in failed:
                self._failures[to.worker_id] = to, {**failed, transport: reason}
                log.warning("transport_failed", worker=to, transport=transport, reason=reason)

    def _retire_idle(self) -> None:
        up = [channel for channel in self._channels if not channel.queue.broken]
        idle = [channel for channel in up if channel.queue.idle and not channel.queue.opening]
        for channel in idle[: max(0, len(up) + 1 - self._end.max_channels)]:
            channel.queue.retire()

    def _watch_deadlines(self) -> None:
        """Expire late answers, on its own thread because the wire may block a channel's thread for a deadline."""
        while not self._closed.wait(self._end.settings.frame_deadline_s / LOOKS):
            for channel in self._all():
                channel.queue.expire()

    def _report(self, handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        self._reports.submit(self._deliver, handoff, outcome)

    def _deliver(self, handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        try:
            self._on_done(handoff, outcome)
        except Exception:  # thread boundary: a failing callback must not stop the reports of other pushes
            log.exception("push_report_failed", handoff=handoff)


class SendChannel:
    """A channel to one worker; a break is permanent. Its first push is queued before the thread starts,
    so even an immediate break is reported. `queue` has the state of the pushes.
    """

    def __init__(self, end: Endpoint, connect: Connect, job: PushJob, generation: int, reports: Reports) -> None:
        self.to = to = job.to
        self.channel: Channel | None = None
        self._end = end
        self._connect = connect
        self._name = ChannelName(end.me.incarnation, to.incarnation, generation)
        self._keys = KeyRelay(lambda key, value: self._put(pb.PeerCommand(store_key=pb.StoreKey(key=key, value=value))))
        self.queue = SendQueue(end, f"channel {self._name} to {to}", self._put, self._keys, reports)
        self._stream: PeerStream | None = None
        self.queue.add(job)
        self._thread = threading.Thread(target=self._run, name=f"kv-send-{self._name}", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def stop(self, why: str) -> None:
        """Break the channel. Called from any thread."""
        self.queue.stop(ChannelBroken(f"channel {self._name} to {self.to}: {why}"))

    def join(self) -> None:
        """Wait for the thread, at most for the deadline of the frame on the wire."""
        self._thread.join()

    def _run(self) -> None:
        with ExitStack() as leaving:
            try:
                self._serve(leaving)
            except HandoffError as error:
                self.queue.stop(error, after_s=REASON_S)
                log.info("channel_closed", worker=self.to, channel=str(self._name), reason=str(error))
            except Exception as error:  # thread boundary: every push gets its report
                self.stop(f"{type(error).__name__}: {error}")
                log.exception("channel_failed", worker=self.to, channel=str(self._name))

    def _serve(self, leaving: ExitStack) -> None:
        started = time.monotonic()
        self._stream = self._connect(self.to.address, self.queue.take, self.stop)
        leaving.callback(self._stream.close)
        self._put(pb.PeerCommand(hello=self._hello()))
        transport, ring, theirs = self.queue.welcome()
        channel = self._open(transport, ring)
        leaving.callback(channel.close)
        self.queue.control_socket = channel.control_socket
        if channel.control_socket is None and not channel.ordered:
            self.queue.window.batch = max(1, ring.slots // 2)
        probed = self._probe(channel, ring)
        self.channel = Channel(self.to.worker_id, transport, probed, self._left_out(transport, theirs))
        took_ms = round((time.monotonic() - started) * 1e3, 1)
        facts = {"worker": self.to, "channel": str(self._name), "transport": transport, "ms": took_ms}
        log.info("channel_opened", **facts, mib_per_s=round(probed / 2**20))
        while True:
            push, frame = self.queue.next()
            if frame is None:
                self.queue.commit(push)
            elif self.queue.one_sided:
                self._share(channel, push, frame)
            elif self._fill(channel, push, frame):
                self._send(channel, ring, push, frame)

    def _left_out(self, taken: str, theirs: Sequence[LeftOut]) -> tuple[LeftOut, ...]:
        """Return why this channel uses no better transport than `taken`, best first. The first reason of one counts."""
        ours = self._end.choice
        private = (LeftOut(t.name, "unavailable", "its KV is private") for t in ours.transports if not t.sends)
        silent = (LeftOut(t.name, "unknown") for t in ours.transports)  # an old receiver sends no reasons
        every = (*ours.left_out, *private, *theirs, *silent)
        found = {one.transport: one for one in reversed(every)}
        better = PREFERENCE[: PREFERENCE.index(taken)] if taken in PREFERENCE else PREFERENCE
        return tuple(found[name] for name in better if name in found)

    def _open(self, transport: str, ring: Ring) -> ChannelEnd:
        chosen = self._end.transport(transport)
        if chosen is None:
            raise ChannelBroken(f"channel {self._name}: {self.to} chose transport {transport!r}, which is not offered")
        self.queue.one_sided = chosen.one_sided
        return chosen.open(self._name, Side.SENDER, self._keys, ring, self._end.settings.frame_deadline_s)

    def _probe(self, channel: ChannelEnd, ring: Ring) -> float:
        """Send the known pattern and wait for its acknowledgement. Return bytes per second, the check included."""
        frame = wire.frame(ring)
        pieces = [pattern(number, frame.nbytes) for number in range(wire.FRAMES)]
        started = time.monotonic()
        for piece in pieces:
            self.queue.wait_credit()
            if not self.queue.one_sided:
                channel.slot(self.queue.window.number)[: frame.nbytes].copy_(piece)
            self._send(channel, ring, None, frame)
        self.queue.wait_probed(wire.FRAMES)
        return wire.FRAMES * frame.nbytes / (time.monotonic() - started)

    def _hello(self) -> pb.PeerHello:
        return pb.PeerHello(
            protocol_version=PROTOCOL_VERSION,
            sender=convert.ref_to_pb(self._end.me),
            receiver=convert.ref_to_pb(self.to),
            transports=[pb.TransportOffer(name=t.name, reach=t.reach) for t in self._end.choice.transports if t.sends],
            generation=self._name.generation,
            fingerprint=self._end.fingerprint,
            layout=convert.layout_to_pb(self._end.kv.layout),
        )

    def _fill(self, channel: ChannelEnd, push: Push, frame: FrameSpec) -> bool:
        """Read the frame's KV into the next slot. Return False if the push has ended or was withdrawn."""
        started, data = time.monotonic(), channel.slot(self.queue.window.number)[: frame.nbytes]
        with self.queue.reading(push, frame) as (blocks, mark):
            if not blocks:
                return False
            if mark is not None:
                mark.wait()
            self._end.kv.gather(frame.layers, blocks, frame.begin, frame.end, data)
            push.digests.append(wire_digest(data))  # on a GPU, this also waits until the blocks have been read
        if self._end.settings.verify_kv or push.job.verify:
            push.whole = push.whole or KVDigest(self._end.kv.layout)
            push.whole.add(frame, data)
        push.filling_s += time.monotonic() - started
        return True

    def _share(self, channel: ChannelEnd, push: Push, frame: FrameSpec) -> None:
        """Announce a frame that the receiver reads from the blocks. Nothing is copied, unless digests are verified. The
        receiver's copies are not in the order of this GPU's streams, so the host waits until the KV is written.
        """
        started, digest, withdrawals = time.monotonic(), b"", push.withdrawals
        if mark := self.queue.mark_of(push, frame):
            mark.synchronize()
        if self._end.settings.verify_frames:
            with self.queue.reading(push, frame) as (blocks, _):
                if not blocks:
                    return
                digest = wire_digest(self._end.kv.copied(frame.layers, blocks, frame.begin, frame.end))
        channel.start(self.queue.window.number, frame.nbytes)
        self.queue.announce(push, frame, digest, withdrawals)
        push.filling_s += time.monotonic() - started

    def _send(self, channel: ChannelEnd, ring: Ring, push: Push | None, frame: FrameSpec) -> None:
        number = self.queue.window.number
        with channel.turn():
            if not self.queue.announce(push, frame):
                return
            channel.start(number, frame.nbytes)
        if number >= ring.slots:
            channel.finish(number - ring.slots)  # returns immediately: the slot was credited, so the frame has left

    def _put(self, command: pb.PeerCommand) -> None:
        control_socket, kind = self.queue.control_socket, command.WhichOneof("command")
        if control_socket is not None and (
            kind in {"frame", "blocks"}
            # A commit with a recurrent state follows its parts over the stream.
            or (
                kind == "commit"
                and not command.commit.HasField("recurrent")
                and control_socket.takes(command.ByteSize())
            )
        ):
            control_socket.send(command.SerializeToString())
        elif self._stream is not None:
            self._stream.send(command)
