"""One end of a channel as a separate process: `python -m tests.integration.channel_peer gloo sender`.

Stdin and stdout replace the Peer stream. They carry lines of JSON: rendezvous keys, announced frames and credits.
Frames have the bytes of `frame`, so that either end can compute the expected digest.
"""

import argparse
import json
import os
import queue
import random
import sys
import threading
from contextlib import closing
from typing import IO, Any

import torch
from torch import Tensor

from baton.core import Incarnation
from baton.engine.kv_cache import KVCache
from baton.errors import ChannelBroken
from baton.hashing import frame_digest
from kvtransfer.handoff import TransferSettings
from kvtransfer.transports.base import ChannelEnd, ChannelName, KeyRelay, Ring, Side
from kvtransfer.transports.select import make_transports
from tests.support.processes import start_program
from tests.support.time_factor import scaled
from tests.unit.kvtransfer.support import LAYOUT

NAME = ChannelName(Incarnation(7, 1), Incarnation(7, 2), 1)
RING = Ring(4, 1 << 20)


def frame(number: int) -> Tensor:
    """Return uint8 of 1 to `RING.size` bytes, on the CPU. Every third frame fills its slot."""
    draw = random.Random(number)
    size = RING.size if number % 3 == 0 else draw.randint(1, RING.size)
    return torch.frombuffer(bytearray(draw.randbytes(size)), dtype=torch.uint8)


def digest(data: Tensor) -> str:
    """Return the digest of a slot on any device. Waits for the device."""
    return frame_digest(data.cpu().numpy().data).hex()


class Wire:
    """Both directions of a control stream. `heard` has all messages but keys, and None after the end of the stream."""

    def __init__(self, reader: IO[str], writer: IO[str]) -> None:
        self._reader = reader
        self._writer = writer
        self._lock = threading.Lock()
        self.keys = KeyRelay(lambda key, value: self.say(key=key, value=value.hex()))
        self.heard: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def say(self, **message: object) -> None:
        with self._lock:
            self._writer.write(json.dumps(message) + "\n")
            self._writer.flush()

    def hear(self, timeout: float = 50.0) -> dict[str, Any] | None:
        return self.heard.get(timeout=scaled(timeout))

    def _read(self) -> None:
        for line in self._reader:
            message = json.loads(line) if line.startswith("{") else {}  # skip log lines
            if "key" in message:
                self.keys.deliver(message["key"], bytes.fromhex(message["value"]))
            elif message:
                self.heard.put(message)
        self.heard.put(None)


def open_end(wire: Wire, transport: str, side: Side, device: str, deadline_s: float) -> ChannelEnd:
    """Open one end. The other one is at the other side of `wire`."""
    chosen = make_transports(TransferSettings(transport=transport), KVCache(LAYOUT, 1, device))[0]
    return chosen.open(NAME, side, wire.keys, RING, deadline_s)


def send(end: ChannelEnd, wire: Wire, count: int) -> None:
    """Send frames 0 to count - 1, at most `RING.slots` ahead of their credits. Then wait for the end of `wire`."""
    for number in range(count):
        if number >= RING.slots and wire.hear() is None:
            raise ChannelBroken("no credit came")
        data = frame(number)
        end.slot(number)[: len(data)].copy_(data)
        wire.say(number=number, nbytes=len(data))
        end.start(number, len(data))
    while wire.hear() is not None:
        pass


def receive(end: ChannelEnd, wire: Wire) -> None:
    """Receive every announced frame. Its credit contains the digest of the received bytes."""
    while (announced := wire.hear(timeout=600)) is not None:
        number, nbytes = announced["number"], announced["nbytes"]
        end.start(number, nbytes)
        end.finish(number)
        wire.say(credit=number, digest=digest(end.slot(number)[:nbytes]))


class Peer:
    """The other end as a process; `end` is this one. After use, stop it and close `end`."""

    def __init__(
        self, side: Side, *flags: str, transport: str = "gloo", device: str = "cpu", deadline_s: float = 10.0
    ) -> None:
        settings = ("--device", device, "--deadline-s", str(deadline_s), *flags)
        self.process = start_program(__name__, transport, Side(1 - side).name.lower(), *settings)
        assert self.process.stdin
        assert self.process.stdout
        self.wire = Wire(self.process.stdout, self.process.stdin)
        assert self.wire.hear() == {"started": self.process.pid}  # the start takes longer than many deadlines
        try:
            self.end = open_end(self.wire, transport, side, device, deadline_s)
        except ChannelBroken:
            self.stop()
            raise
        assert self.wire.hear() == {"ready": self.process.pid}

    def take(self, number: int) -> bool:
        """Receive an announced frame and send its credit. Return whether the bytes are right."""
        announced = self.wire.hear()
        assert announced is not None
        assert announced["number"] == number
        self.end.start(number, announced["nbytes"])
        self.end.finish(number)
        right = torch.equal(self.end.slot(number)[: announced["nbytes"]].cpu(), frame(number))
        self.wire.say(credit=number)
        return right

    def give(self, number: int) -> None:
        """Announce and send a frame, without waiting for credits."""
        data = frame(number)
        self.end.slot(number)[: len(data)].copy_(data)
        self.wire.say(number=number, nbytes=len(data))
        self.end.start(number, len(data))

    def credit(self) -> int:
        """Check the digest of the next credit and return its number."""
        credit = self.wire.hear()
        assert credit is not None
        assert credit["digest"] == digest(frame(credit["credit"]))
        return int(credit["credit"])

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Kill the process, and leave no thread and no pipe here."""
        self.kill()
        self.wire.thread.join(scaled(5))
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()


def main() -> None:
    """Send `started` and `ready`, serve the channel, and send `failed` if it broke."""
    parser = argparse.ArgumentParser()
    parser.add_argument("transport")
    parser.add_argument("side", choices=["sender", "receiver"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--deadline-s", type=float, default=10.0)
    parser.add_argument("--frames", type=int, default=10_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    wire, side = Wire(sys.stdin, sys.stdout), Side[arguments.side.upper()]
    wire.say(started=os.getpid())
    try:
        with closing(open_end(wire, arguments.transport, side, arguments.device, arguments.deadline_s)) as end:
            wire.say(ready=os.getpid())
            if side is Side.RECEIVER:
                receive(end, wire)
            else:
                send(end, wire, arguments.frames)
    except ChannelBroken as error:
        wire.say(failed=str(error))


if __name__ == "__main__":
    main()
