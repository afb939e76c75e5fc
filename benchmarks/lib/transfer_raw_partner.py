"""Receiving process of the raw limits. See `transfer_raw`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from benchmarks.lib import transfer_bare as bare
from benchmarks.lib.protocol import serve
from kvtransfer.transports import nixl_agent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from benchmarks.lib.protocol import Answer, Handler, Setup

DEVICES = {"gloo": "cpu", "nccl": "cuda:1"}


class Taker:
    """The receiving end of each measurement."""

    def __init__(self) -> None:
        self._groups: dict[str, bare.Group] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._ring: bare.SharedRing | None = None
        self._library: Any = None
        self._agent: Any = None

    def meet(self, kind: str, store: str) -> Answer:
        """Build this end of a pair, and send a byte through it."""
        group = self._groups[kind] = bare.PAIRS[kind](store, bare.RECEIVER)
        self._say(kind, group)
        return {}

    def pair(self, kind: str, nbytes: int, frame: int, window: int) -> Answer:
        """Signal readiness, receive, and signal completion."""
        group, data = self._groups[kind], self._room(nbytes, DEVICES[kind])
        self._say(kind, group)
        bare.stream(group.recv, bare.SENDER, data, frame, window)  # type: ignore[union-attr]  # not in the stub
        self._say(kind, group)
        return {}

    def ready(self, file: int, nbytes: int, frame: int, slots: int) -> Answer:
        """Map the ring and allocate a buffer."""
        self._ring = bare.SharedRing(file, slots, frame)
        self._room(nbytes, "cpu")
        return {}

    def shm(self) -> Answer:
        """Copy the data out of the ring."""
        assert self._ring is not None
        self._ring.read(self._buffer)
        return {}

    def nixl(self, nbytes: int) -> Answer:
        """Expose a buffer to reads. Return its address and the agent's metadata."""
        self._library = self._library or nixl_agent.load("nixl._bindings")
        self._room(nbytes, "cpu")
        self._agent = nixl_agent.make_agent(self._library, bare.NIXL_CONFIG, answers=True)
        nixl_agent.register(self._library, self._agent, self._buffer.data_ptr(), nbytes)
        return {"address": self._buffer.data_ptr(), "metadata": self._agent.getLocalMD().hex()}

    def _say(self, kind: str, group: bare.Group) -> None:
        byte = torch.zeros(1, dtype=torch.uint8, device=DEVICES[kind])
        bare.stream(group.send, bare.SENDER, byte, 1, 1)  # type: ignore[union-attr]  # not in the stub

    def _room(self, nbytes: int, device: str) -> Tensor:
        if len(self._buffer) != nbytes or self._buffer.device != torch.device(device):
            self._buffer = bare.buffer(nbytes, device)
        return self._buffer


def load(setup: Setup) -> tuple[Answer, Mapping[str, Handler]]:
    """Return an empty description and the handlers for `serve`."""
    del setup
    torch.set_num_threads(1)
    taker = Taker()
    return {}, {"meet": taker.meet, "pair": taker.pair, "ready": taker.ready, "shm": taker.shm, "nixl": taker.nixl}


if __name__ == "__main__":
    serve(load)
