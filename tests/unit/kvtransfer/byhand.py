"""A receiver whose senders and data channels are made by hand: messages and frames come when the test says so."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from baton.core import PROTOCOL_VERSION
from baton.errors import ChannelBroken
from baton.rpc import convert
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.receiver import PeerService
from kvtransfer.transport import Ring, local_ring
from kvtransfer.transports.express import Express
from tests.support.time_factor import scaled
from tests.unit.kvtransfer.support import (
    FINGERPRINT,
    LAYOUT,
    SETTINGS,
    D,
    LoopbackPeer,
    P,
    RecordingTable,
    make_end,
    make_job,
    make_kv,
    settled,
)

JOB = make_job("r", 8)
HANDOFF = convert.handoff_to_pb(JOB.handoff)
LAYER = 8 * LAYOUT.layer_token_bytes  # of the whole handoff
SMALL = replace(SETTINGS, frame_size=LAYER, credits=2)


class HandMade:
    """A transport and its only side: what the session expects is listed, and comes when the test says so."""

    name, reach, device = "by hand", "here", torch.device("cpu")

    def __init__(self) -> None:
        self.ends: list[HandMadeEnd] = []

    def open(self, name, side, keys, ring: Ring, deadline_s: float) -> "HandMadeEnd":
        self.ends.append(HandMadeEnd(ring))
        return self.ends[-1]


class HandMadeEnd:
    express: Express | None = None

    def __init__(self, ring: Ring) -> None:
        self._ring = local_ring(ring, torch.device("cpu"))
        self._changed = threading.Condition()
        self._arrived = 0
        self._closed = False
        self.expected: list[tuple[int, int]] = []
        self.waited: list[int] = []

    def arrive(self, data: torch.Tensor) -> None:
        """The next frame is there, whether it was expected or not."""
        with self._changed:
            self.slot(self._arrived)[: len(data)].copy_(data)
            self._arrived += 1
            self._changed.notify_all()

    def slot(self, number: int) -> torch.Tensor:
        return self._ring[number % len(self._ring)]

    def start(self, number: int, nbytes: int) -> None:
        self.expected.append((number, nbytes))

    def finish(self, number: int) -> None:
        self.waited.append(number)
        with self._changed:
            assert self._changed.wait_for(lambda: self._closed or self._arrived > number, scaled(20))
            if self._closed:
                raise ChannelBroken("closed")

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self.express is not None:
            self.express.close()


class Call:
    """A sender's stream by hand."""

    def __init__(self, peer: LoopbackPeer, sender=P, generation: int = 3) -> None:
        self.replies: queue.Queue[pb.PeerReply | str] = queue.Queue()
        self.stream = peer.connect("", self.replies.put, self.replies.put)
        self._sender = sender
        self._generation = generation

    def say(self, **command) -> None:
        self.stream.send(pb.PeerCommand(**command))

    def next(self) -> pb.PeerReply | str:
        return self.replies.get(timeout=scaled(5))

    def hear(self) -> str:
        """The kind of the next reply; of a refusal, its reason; "ended" at the end."""
        reply = self.next()
        if isinstance(reply, str):
            return reply
        if reply.HasField("refused"):
            return pb.HandoffRefusal.Name(reply.refused.reason).removeprefix("HANDOFF_REFUSAL_")
        return str(reply.WhichOneof("reply"))

    def hello(self, **change) -> None:
        hello = {
            "protocol_version": PROTOCOL_VERSION,
            "sender": convert.ref_to_pb(self._sender),
            "receiver": convert.ref_to_pb(D),
            "transports": [pb.TransportOffer(name="by hand", reach="here")],
            "generation": self._generation,
            "fingerprint": FINGERPRINT,
            "layout": convert.layout_to_pb(LAYOUT),
        }
        self.say(hello=pb.PeerHello(**{**hello, **change}))

    def offer(self, **change) -> None:
        offer = {"handoff": HANDOFF, "fingerprint": FINGERPRINT, "known_tokens": 8, "skip": 0}
        self.say(offer=pb.Offer(**{**offer, **change}))

    def frame(self, layer: int = 0, **change) -> None:
        """By default: a layer as a whole, and as many frames before it."""
        frame = {"handoff": HANDOFF, "sequence": layer, "begin": 0, "end": 8, "nbytes": LAYER}
        layers = {"layer_begin": layer, "layer_end": layer + 1}
        self.say(frame=pb.FrameAnnounce(**{**frame, **layers, **change}))

    def commit(self, tokens: int = 8, digests=()) -> None:
        end = make_end(tokens)
        assert end.spec is not None
        spec, first = convert.spec_to_pb(end.spec), convert.tokens_to_pb(end.first)
        self.say(commit=pb.Commit(handoff=HANDOFF, spec=spec, first=first, digests=digests))

    def spoil(self) -> None:
        """Say what makes no sense: it ends the session."""
        self.say(abort=pb.AbortHandoff())

    def welcomed(self) -> "Call":
        self.hello()
        assert self.hear() == "welcome"
        return self

    def offered(self) -> "Call":
        self.welcomed().offer()
        assert self.hear() == "offer_accepted"
        return self


class Receiver:
    def __init__(self, settings=SMALL) -> None:
        self.table, self.kv = RecordingTable(), make_kv(None)
        self.table.reserve(JOB.handoff, [11, 12])
        self.channels = HandMade()
        self.peer = LoopbackPeer(lambda: PeerService(self.kv, D, FINGERPRINT, settings, self.table, [self.channels]))
        self.calls: list[Call] = []

    def call(self, *args, **kwargs) -> Call:
        self.calls.append(Call(self.peer, *args, **kwargs))
        return self.calls[-1]

    @property
    def end(self) -> HandMadeEnd:
        assert settled(lambda: bool(self.channels.ends))
        return self.channels.ends[-1]

    def close(self) -> None:
        for end in self.channels.ends:
            end.close()
        self.peer.run(self.peer.service.close())  # first: a session that waits for hello would hold the streams up
        for call in self.calls:
            call.stream.close()
        self.peer.close()


@contextmanager
def running(receiver: Receiver) -> Iterator[Receiver]:
    torch.set_num_threads(1)
    try:
        yield receiver
    finally:
        receiver.close()
    assert settled(lambda: not sessions())


def sessions() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-recv")]
