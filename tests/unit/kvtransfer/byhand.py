"""A receiver with manual senders and data channels: the test sends each message and frame."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace

import torch

from baton.core import PROTOCOL_VERSION, HandoffId
from baton.errors import ChannelBroken
from baton.rpc import convert
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.frames import wire_digest
from kvtransfer.receiver import PeerService
from kvtransfer.transports.base import Choice, Ring, local_ring
from kvtransfer.transports.unix_socket import ControlSocket
from tests.support.time_factor import scaled
from tests.support.waiting import eventually
from tests.unit.kvtransfer.support import (
    FINGERPRINT,
    LAYER,
    LAYOUT,
    SETTINGS,
    D,
    LoopbackPeer,
    P,
    RecordingTable,
    make_end,
    make_job,
    make_kv,
)

JOB = make_job("r", 8)
HANDOFF = convert.handoff_to_pb(JOB.handoff)
SMALL = replace(SETTINGS, frame_size=LAYER, credits=2)
ZEROS = torch.zeros(LAYER, dtype=torch.uint8)  # one layer of the whole handoff
DIGESTS = [wire_digest(ZEROS)] * 3


class HandMade:
    """A transport and its only end. It lists the frames that the session expects; the test delivers them."""

    name, reach = "by hand", "here"
    one_sided, sends = False, True

    def __init__(self, *, control_socket: bool) -> None:
        self.ends: list[HandMadeEnd] = []
        self._control_socket = control_socket

    def open(self, name, side, keys, ring: Ring, deadline_s: float) -> HandMadeEnd:
        self.ends.append(HandMadeEnd(ring, control_socket=self._control_socket))
        return self.ends[-1]


class HandMadeEnd:
    """`ours`: the test's half of the control socket, if there is one."""

    control_socket: ControlSocket | None = None
    ours: socket.socket | None = None
    ordered = False
    pool = None

    def __init__(self, ring: Ring, *, control_socket: bool) -> None:
        self._ring = local_ring(ring, torch.device("cpu"))
        self._there = threading.Semaphore(0)
        self._arrived = 0
        self.closed = False
        self.expected: list[tuple[int, int]] = []
        self.waited: list[int] = []
        if control_socket:
            theirs, self.ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.settimeout(scaled(5))
            self.control_socket = ControlSocket("by hand", theirs)

    def arrive(self, data: torch.Tensor = ZEROS) -> None:
        """Deliver the next frame, expected or not."""
        self.slot(self._arrived)[: len(data)].copy_(data)
        self._arrived += 1
        self._there.release()

    def slot(self, number: int) -> torch.Tensor:
        return self._ring[number % len(self._ring)]

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def start(self, number: int, nbytes: int) -> None:
        self.expected.append((number, nbytes))

    def finish(self, number: int) -> None:
        self.waited.append(number)
        assert self.closed or self._there.acquire(timeout=scaled(20))
        if self.closed:
            raise ChannelBroken("closed")

    def close(self) -> None:
        self.leave()
        if self.control_socket is not None:
            self.control_socket.close()

    def leave(self) -> None:
        """Close the end, as if the sender was gone."""
        self.closed = True
        self._there.release()
        if self.ours is not None:
            self.ours.shutdown(socket.SHUT_RDWR)


def announcement(layer: int = 0, **change) -> pb.FrameAnnounce:
    """Return an announcement, by default of a whole layer, with the layer as its number."""
    frame = {"handoff": HANDOFF, "sequence": layer, "begin": 0, "end": 8, "nbytes": LAYER}
    layers = {"layer_begin": layer, "layer_end": layer + 1}
    return pb.FrameAnnounce(**{**frame, **layers, **change})


def commit_of(tokens: int = 8, digests: Sequence[bytes] = DIGESTS, **change) -> pb.Commit:
    end = make_end(tokens)
    assert end.spec is not None
    sequence = {"spec": convert.spec_to_pb(end.spec), "first": convert.tokens_to_pb(end.first)}
    return pb.Commit(handoff=HANDOFF, digests=digests, **{**sequence, **change})


class Call:
    """A manual sender stream. `beside`: kinds of the replies received over the control socket."""

    def __init__(self, receiver: Receiver, sender=P, generation: int = 3) -> None:
        self.replies: queue.Queue[pb.PeerReply | str] = queue.Queue()
        self.beside: list[str | None] = []
        self.receiver = receiver
        self.stream = receiver.peer.connect("", self.replies.put, self.replies.put)
        self._sender = sender
        self._generation = generation
        self._control_socket: socket.socket | None = None
        self._frames = 0

    def say(self, **command) -> None:
        self.stream.send(pb.PeerCommand(**command))

    def send(self, packet: bytes) -> None:
        assert self._control_socket is not None
        self._control_socket.send(packet)

    def next(self) -> pb.PeerReply | str:
        return self.replies.get(timeout=scaled(5))

    def hear(self) -> str:
        """Return the kind of the next reply, the reason of a rejection, or "ended" at the end of the stream."""
        reply = self.next()
        if isinstance(reply, str):
            return reply
        if reply.HasField("refused"):
            return pb.HandoffRefusal.Name(reply.refused.reason).removeprefix("HANDOFF_REFUSAL_")
        return str(reply.WhichOneof("reply"))

    def refused(self, reason: str, detail: str = "") -> None:
        reply = self.next()
        assert isinstance(reply, pb.PeerReply)
        assert reply.refused.reason == pb.HandoffRefusal.Value(f"HANDOFF_REFUSAL_{reason}"), reply
        assert detail in reply.refused.detail
        assert self.hear() == "ended"

    def hello(self, **change) -> None:
        version = {"protocol_version": PROTOCOL_VERSION, "generation": self._generation}
        ends = {"sender": convert.ref_to_pb(self._sender), "receiver": convert.ref_to_pb(D)}
        model = {"fingerprint": FINGERPRINT, "layout": convert.layout_to_pb(self.receiver.kv.layout)}
        transports = {"transports": [pb.TransportOffer(name="by hand", reach="here")]}
        self.say(hello=pb.PeerHello(**{**version, **ends, **model, **transports, **change}))

    def offer(self, **change) -> None:
        offer = {"handoff": HANDOFF, "fingerprint": FINGERPRINT, "known_tokens": 8, "skip": 0}
        self.say(offer=pb.Offer(**{**offer, **change}))

    def frame(self, layer: int = 0, **change) -> None:
        self._frames += 1
        self._hurry(pb.PeerCommand(frame=announcement(layer, **change)))

    def arrived(self, layers: Iterable[int] = range(3)) -> Call:
        """Send layers of zeros and expect their credits."""
        for layer in layers:
            self.frame(layer)
            self.receiver.end.arrive()
            assert self.next() == pb.PeerReply(credit=pb.Credit(sequence=layer))
        return self

    def commit(self, *args, **change) -> None:
        self._hurry(pb.PeerCommand(commit=commit_of(*args, **change), after=self._frames))

    def abort(self, after: int = 0) -> None:
        self.say(abort=pb.AbortHandoff(handoff=HANDOFF), after=after)
        self.receiver.table.wait_for(("aborted", JOB.handoff))

    def welcomed(self) -> Call:
        ends = self.receiver.channels.ends
        before = len(ends)
        self.hello()
        assert self.hear() == "welcome"
        self._control_socket = eventually(lambda: ends[before:])[0].ours  # opened at some time after the welcome
        if self._control_socket is not None:
            threading.Thread(target=self._listen, args=(self._control_socket,), daemon=True).start()
        return self

    def offered(self, handoff: HandoffId = JOB.handoff) -> Call:
        self.receiver.table.reserve(handoff, [11, 12])
        self.welcomed().offer(handoff=convert.handoff_to_pb(handoff))
        assert self.hear() == "offer_accepted"
        return self

    def _hurry(self, command: pb.PeerCommand) -> None:
        if self._control_socket is None:
            self.stream.send(command)
        else:
            self.send(command.SerializeToString())

    def _listen(self, control_socket: socket.socket) -> None:
        with suppress(ConnectionError):
            while packet := control_socket.recv(1 << 15):
                reply = pb.PeerReply.FromString(packet)
                self.beside.append(reply.WhichOneof("reply"))
                self.replies.put(reply)


class Receiver:
    def __init__(self, settings=SMALL, *, control_socket: bool = False, state_size: int = 0) -> None:
        self.table, self.kv = RecordingTable(), make_kv(None, layout=replace(LAYOUT, state_size=state_size))
        self.table.reserve(JOB.handoff, [11, 12])
        self.channels = HandMade(control_socket=control_socket)
        ends = (self.kv, D, FINGERPRINT, settings, self.table, Choice([self.channels]))
        self.peer = LoopbackPeer(lambda: PeerService(*ends))
        self.calls: list[Call] = []

    def call(self, *args, **kwargs) -> Call:
        self.calls.append(Call(self, *args, **kwargs))
        return self.calls[-1]

    @property
    def end(self) -> HandMadeEnd:
        return eventually(lambda: self.channels.ends)[-1]

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self.channels.ends:
            end.leave()
        self.peer.run(self.peer.service.close())  # first: a session that waits for hello would block the streams
        for call in self.calls:
            call.stream.close()
        self.peer.close()
        eventually(lambda: not sessions())


def sessions() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-recv")]
