"""Sending process of measured handoffs of computed KV, with the product's code, lane by lane."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import torch

import baton
from benchmarks.lib.protocol import serve
from benchmarks.lib.transfer_lane import Lane, end_of
from benchmarks.lib.transfer_partner import Partner
from benchmarks.lib.transfer_peer import blocks_of, make_kv
from kvtransfer.handoff import TransferSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.engine.kv_cache import KVCache
    from benchmarks.lib.protocol import Answer, Handler, Setup


class Pusher:
    """Opens lanes and hands over through them. A lane stays open until it is closed, as between two workers."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._partner = Partner("benchmarks.lib.transfer_peer", setup)
        self._kv: dict[str, KVCache] = {}
        self._lanes: dict[int, tuple[Lane, list[int]]] = {}
        self._numbers = count()

    def open(self, settings: dict[str, object], device: str = "cpu", peer_device: str = "cpu") -> Answer:
        """Open a lane with these `TransferSettings`, from `device` of this process to `peer_device` of the partner."""
        kv = self._kv[device] = self._kv.get(device) or make_kv(self._setup, device, exposed=True)
        chosen = TransferSettings(**settings)  # type: ignore[arg-type]  # from JSON
        number, lane = next(self._numbers), Lane(kv, self._partner, chosen, peer_device)
        self._lanes[number] = lane, blocks_of(kv, seed=1)
        return {"lane": number}

    def close(self, lane: int) -> Answer:
        """Close the lane on both sides."""
        self._lanes.pop(lane)[0].close()
        return {}

    def push(self, lane: int, tokens: int, repeats: int, *, from_begin: bool = False) -> Answer:
        """Run some handoffs in sequence. Returns a list per value of `Lane.hand_over`."""
        way, blocks = self._lanes[lane]
        end = end_of(tokens)
        way.wake(blocks)
        way.hand_over(blocks, end, from_begin=from_begin)
        runs = [way.hand_over(blocks, end, from_begin=from_begin) for _ in range(repeats)]
        return {name: [run[name] for run in runs] for name in runs[0]}


def load(setup: Setup) -> tuple[Answer, Mapping[str, Handler]]:
    """Return the version and the handlers for `serve`."""
    torch.set_num_threads(1)
    pusher = Pusher(setup)
    version = f"{baton.__version__} (torch {torch.__version__})"
    return {"version": version}, {"open": pusher.open, "close": pusher.close, "push": pusher.push}


if __name__ == "__main__":
    serve(load)
