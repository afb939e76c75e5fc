"""One sender's channel to one receiver, for one generation: a Peer stream, a data channel, one thread, one queue."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
import torch

from baton.core import PROTOCOL_VERSION
from baton.errors import ChannelBroken, HandoffError
from baton.rpc import convert
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.outbox import Outbox, Wording
from kvtransfer.plan import staging_bytes
from kvtransfer.transport import ChannelName, KeyRelay, Side, wire_digest

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from baton.core import HandoffId, WorkerRef
    from baton.engine.kv import KVCache
    from kvtransfer.handoff import PushJob, PushResult, TransferSettings
    from kvtransfer.push import Push
    from kvtransfer.stream import Connect, PeerStream
    from kvtransfer.transport import ChannelEnd, Transport

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LinkSetup:
    """What all links of a sender have in common. `ended` is called by a link's thread as its last act."""

    kv: KVCache
    me: WorkerRef
    fingerprint: str
    settings: TransferSettings
    transport: Transport
    connect: Connect
    report: Callable[[HandoffId, PushResult | HandoffError], None]
    ended: Callable[[Link], None]


class Link:
    """Runs from the start until it breaks, which is final. The state of its pushes is in `Outbox`."""

    def __init__(self, setup: LinkSetup, to: WorkerRef, generation: int) -> None:
        self.to = to
        self._setup = setup
        self._name = ChannelName(setup.me.incarnation, to.incarnation, generation)
        self._deadline_s = setup.settings.frame_deadline_s
        self._keys = KeyRelay(lambda key, value: self._say(pb.PeerCommand(store_key=pb.StoreKey(key=key, value=value))))
        wording = Wording(
            f"channel {self._name} to {to}",
            setup.kv.layout,
            setup.fingerprint,
            setup.transport.name,
            self._deadline_s,
        )
        self._outbox = Outbox(wording, self._say, self._keys.deliver, setup.report)
        self._stream: PeerStream | None = None
        self._thread = threading.Thread(target=self._run, name=f"kv-send-{self._name}", daemon=True)
        self._thread.start()

    @property
    def broken(self) -> bool:
        return self._outbox.broken

    @property
    def idle(self) -> bool:
        return self._outbox.idle

    def push(self, job: PushJob) -> bool:
        """Take a push; False: the link is broken. Raises ValueError for a job that contradicts itself."""
        blocks = self._setup.kv.layout.blocks_for(job.known_tokens)
        if not 1 <= blocks <= len(job.blocks) or len(job.spec) != job.known_tokens + 1:
            raise ValueError(
                f"push {job.handoff}: {job.known_tokens} positions need {blocks} blocks and a spec of one token more,"
                f" got {len(job.blocks)} and {len(job.spec)}"
            )
        return self._outbox.add(job)

    def abort(self, handoff: HandoffId) -> None:
        """See Sender.abort."""
        self._outbox.abort(handoff)

    def stop(self, why: str) -> None:
        """Break the link, from any thread."""
        self._outbox.stop(ChannelBroken(f"channel {self._name} to {self.to}: {why}"))

    def join(self) -> None:
        """Wait for the thread: at most the deadline of what is on the wire."""
        self._thread.join()

    def _run(self) -> None:
        channel: ChannelEnd | None = None
        try:
            channel = self._open()
            while True:
                self._transfer(channel, self._outbox.next())
        except HandoffError as error:
            self._outbox.stop(error)
            log.info("channel closed", channel=str(self._name), why=str(error))
        except Exception as error:  # the boundary of this thread: whatever it is, every push gets its report
            self.stop(f"{type(error).__name__}: {error}")
            log.exception("channel failed", channel=str(self._name))
        finally:
            if channel is not None:
                channel.close()
            if self._stream is not None:
                self._stream.close()
            self._setup.ended(self)

    def _open(self) -> ChannelEnd:
        started, setup = time.monotonic(), self._setup
        self._stream = setup.connect(self.to.address, self._outbox.take, self.stop)
        self._say(pb.PeerCommand(hello=self._hello()))
        welcome = self._outbox.welcome()
        nbytes = staging_bytes(setup.kv.layout, welcome.frame_size)
        self._staging = torch.empty(nbytes, dtype=torch.uint8, device=setup.transport.device)
        channel = setup.transport.open(self._name, Side.SENDER, self._keys, self._deadline_s)
        took_ms = round((time.monotonic() - started) * 1e3, 1)
        log.info("channel open", to=str(self.to), channel=str(self._name), transport=setup.transport.name, ms=took_ms)
        return channel

    def _hello(self) -> pb.PeerHello:
        return pb.PeerHello(
            protocol_version=PROTOCOL_VERSION,
            sender=convert.ref_to_pb(self._setup.me),
            receiver=convert.ref_to_pb(self.to),
            transport=self._setup.transport.name,
            generation=self._name.generation,
            fingerprint=self._setup.fingerprint,
            layout=convert.layout_to_pb(self._setup.kv.layout),
        )

    def _transfer(self, channel: ChannelEnd, push: Push) -> None:
        for index, frame in enumerate(push.plan):
            data = self._staging[: frame.nbytes]
            if not self._read(push, index, data) or not self._outbox.announce(push, index):
                return  # it ended meanwhile, and has its report
            channel.send(data)
        self._outbox.commit(push)

    def _read(self, push: Push, index: int, data: Tensor) -> bool:
        frame = push.plan[index]
        with self._outbox.reading(push) as allowed:
            if allowed:
                self._setup.kv.gather(frame.layers, push.job.blocks[frame.blocks], data)
                push.digests.append(wire_digest(data))  # on a GPU, this also waits until the blocks have been read
        return allowed

    def _say(self, command: pb.PeerCommand) -> None:
        if self._stream is not None:
            self._stream.send(command)
