"""Prefill process of `transfer_slowdown`: steps of the real engine on the first core, with a load on the second one."""

from __future__ import annotations

import os
import random
import threading
import time
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

import baton
from baton.core import HandoffId, Sampling, SequenceSpec
from baton.engine.engine import Engine
from baton.engine.models.loading import load_model
from baton.tokenizer import load_tokenizer
from benchmarks.lib.protocol import serve
from benchmarks.lib.transfer_lane import Lane, end_of
from benchmarks.lib.transfer_partner import Partner
from benchmarks.lib.transfer_peer import DTYPES, blocks_of, make_kv
from kvtransfer.handoff import TransferSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.lib.protocol import Answer, Handler, Setup


class Slowed:
    """The engine, and lanes for handoffs of other KV while it computes. All threads here are on the first core."""

    def __init__(self, setup: Setup) -> None:
        first, second = sorted(os.sched_getaffinity(0))[:2]
        os.sched_setaffinity(0, {second})  # processes inherit it
        self._reader = Partner("benchmarks.lib.transfer_reader", setup)
        partner = Partner("benchmarks.lib.transfer_peer", setup)
        os.sched_setaffinity(0, {first})
        backend = load_model(setup.model, dtype=DTYPES[setup.dtype])
        limits: Any = {"total_blocks": backend.layout.blocks_for(setup.kv_tokens), "max_batched_tokens": 2048}
        self._engine = Engine(backend, load_tokenizer(Path(setup.model)), **limits, exposed=True)
        self._random, self._numbers = random.Random(0), count()
        kv = make_kv(setup, "cpu", exposed=True)
        self._lanes = {name: Lane(kv, partner, TransferSettings(transport=name), "cpu") for name in ("shm", "gloo")}
        self._blocks, self._tokens = blocks_of(kv, 1), kv.total_blocks * kv.layout.block_size - 1
        exposed = self._engine.kv.exposed
        assert exposed is not None
        path = f"/proc/{os.getpid()}/fd/{exposed.file}"
        self._reader.ask("map", path=path, blocks=exposed.shape.blocks, kv_bytes=exposed.shape.kv_bytes)
        self.cores = f"{first} and {second}"

    def steps(self, load: str, tokens: int, repeats: int) -> Answer:
        """Run steps of `tokens` new prompt tokens under a load. Returns the median seconds and the bytes per second."""
        self._step(tokens)
        if load in self._lanes:
            return self._beside_handoffs(self._lanes[load], tokens, repeats)
        self._reader.ask("begin", kind=load)
        seconds = [self._step(tokens) for _ in range(repeats)]
        return {"seconds": median(seconds), **self._reader.ask("end")}

    def _beside_handoffs(self, lane: Lane, tokens: int, repeats: int) -> Answer:
        end, stop, moved = end_of(self._tokens), threading.Event(), list[int]()

        def hand_over() -> None:
            while not stop.is_set():
                lane.hand_over(self._blocks, end, from_begin=False)
                moved.append(self._tokens * self._engine.layout.layer_token_bytes * self._engine.layout.layers)

        lane.wake(self._blocks)
        feeder = threading.Thread(target=hand_over)
        began = time.monotonic()
        feeder.start()
        seconds = [self._step(tokens) for _ in range(repeats)]
        stop.set()
        feeder.join()
        return {"seconds": median(seconds), "bytes_per_s": sum(moved) / (time.monotonic() - began)}

    def _step(self, tokens: int) -> float:
        ids = tuple(self._random.randrange(3, self._engine.backend.vocab_size) for _ in range(tokens))
        sampling = Sampling(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
        self._engine.submit(HandoffId(f"step-{next(self._numbers)}", 1), SequenceSpec(ids, sampling))
        began = time.perf_counter()
        while self._engine.has_work():
            self._engine.step()
        return time.perf_counter() - began


def load(setup: Setup) -> tuple[Answer, Mapping[str, Handler]]:
    """Return the version and the cores, and the handlers for `serve`."""
    torch.set_num_threads(1)
    slowed = Slowed(setup)
    return {"version": f"{baton.__version__} (torch {torch.__version__})", "cores": slowed.cores}, {
        "steps": slowed.steps
    }


if __name__ == "__main__":
    serve(load)
