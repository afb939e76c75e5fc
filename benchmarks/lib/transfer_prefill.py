"""Prefill worker of the exposure measurements: the real engine, role and sender, without router and ledger.

The role's own events give the KV sent during the computation of a prompt and the rest after it.
"""

from __future__ import annotations

import random
import time
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

import baton
from baton.clock import SystemClock
from baton.core import HandoffId, Incarnation, Role, Sampling, SequenceSpec, WorkerInfo, WorkerRef
from baton.engine.engine import Engine
from baton.engine.models.loading import load_model
from baton.rpc import convert
from baton.rpc.v1 import worker_pb2
from baton.tokenizer import load_tokenizer
from baton.worker.engine_loop import EngineLoop
from benchmarks.lib.protocol import serve
from benchmarks.lib.transfer_lane import Lane, end_of
from benchmarks.lib.transfer_partner import Partner
from benchmarks.lib.transfer_peer import DTYPES, FINGERPRINT
from benchmarks.lib.transfer_watch import DECODE, NotedSender, Router, Steps
from kvtransfer.handoff import TransferSettings
from prefill_workers.worker import PrefillWorker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.lib.protocol import Answer, Handler, Setup
    from benchmarks.lib.transfer_lane import Told

MAX_BATCHED_TOKENS = 2048
ROUND_TRIPS = 5  # measurements per median
PAUSE_S = 0.1  # before each, because the commit also finds both ends idle for about the time of a layer
STEPS = 4  # decode steps per median


class Prefill:
    """Prompts through lanes with their own settings. This process samples first tokens; KV arrives in the partner."""

    def __init__(self, setup: Setup) -> None:
        self._partner = Partner("benchmarks.lib.transfer_peer", setup)
        backend = load_model(setup.model, dtype=DTYPES[setup.dtype])
        blocks, tokenizer = backend.layout.blocks_for(setup.kv_tokens), load_tokenizer(Path(setup.model))
        limits: Any = {"total_blocks": blocks, "max_batched_tokens": MAX_BATCHED_TOKENS}
        self._engine = Engine(backend, tokenizer, **limits, exposed=True)
        self._loop, self._steps = EngineLoop(self._engine), Steps()
        self._loop.start(self._steps)
        self._router, self._random = Router(), random.Random(0)
        self._lanes: dict[int, tuple[Lane, NotedSender, PrefillWorker]] = {}
        self._numbers = count()

    def open(self, settings: dict[str, object]) -> Answer:
        """Open a lane with these `TransferSettings`. `coalesce_below` is the size from which a prompt streams."""
        lane = Lane(self._engine.kv, self._partner, TransferSettings(**settings), "cpu")  # type: ignore[arg-type]  # JSON
        ref, layout = WorkerRef("prefill-0", Incarnation(1, 1), "none"), self._engine.layout
        blocks, length = self._engine.pool.total, self._engine.max_model_len
        info = WorkerInfo(ref, Role.PREFILL, FINGERPRINT, "benchmark", length, blocks, layout)
        below, number = lane.settings.coalesce_below, next(self._numbers)
        role = PrefillWorker(info, self._engine, self._loop, SystemClock(), coalesce_below=below)
        self._lanes[number] = lane, NotedSender(lane.sender), role
        return {"lane": number}

    def close(self, lane: int) -> Answer:
        """Close the lane on both sides."""
        self._lanes.pop(lane)[0].close()
        return {}

    def prompt(self, lane: int, tokens: int) -> Answer:
        """Run one new prompt. Returns its times and its KV transfer, in seconds."""
        way, sender, role = self._lanes[lane]
        ids = tuple(self._random.randrange(3, self._engine.backend.vocab_size) for _ in range(tokens))
        round_trip_s = self._round_trip(way)
        way.on_done = role.push_ended
        self._loop.submit(lambda: self._attach(role, sender))
        handoff = way.new()
        told, command = way.told[handoff.request_id], _prefill(handoff, ids, way.to)
        began = time.monotonic()
        self._loop.submit(lambda: role.command(self._router, command))
        first_at, _ = self._router.wait("tokens")
        pushed = self._router.wait("pushed")[1].pushed
        return {
            "ttft_s": first_at - began,
            "exposed_s": pushed.exposed_s,
            "offer_s": pushed.round_trip_s,
            "round_trip_s": round_trip_s,
            "kv_bytes": pushed.kv_bytes,
            "frames": pushed.frames,
            **way.committed(handoff),
            "step_s": self._decode_step(ids),
            **_times(sender, told),
            "began": began,
        }

    def _attach(self, role: PrefillWorker, sender: NotedSender) -> None:
        sender.computed_at.clear()
        self._steps.role = role
        role.attach(sender)

    def _round_trip(self, way: Lane) -> float:
        """Return the median round trip of a control message (an offer) while this process is idle."""
        way.on_done = way.ended
        way.wake([0])
        found = []
        for _ in range(ROUND_TRIPS):
            time.sleep(PAUSE_S)
            found.append(way.hand_over([0], end_of(1), from_begin=True)["round_trip_s"])
        return median(found)

    def _decode_step(self, ids: tuple[int, ...]) -> float:
        """Return the seconds per next token of this prompt here, on its cached KV."""
        self._loop.submit(lambda: self._engine.submit(HandoffId(DECODE, 1), _spec(ids, STEPS + 1)))
        at = self._steps.token_times(STEPS + 1)
        return median(later - earlier for earlier, later in pairwise(at))


def _times(sender: NotedSender, told: Told) -> Answer:
    frames = [(at, f.layer_begin, f.layer_end, f.begin, f.end) for at, f in told.announced]
    return {"computed": list(sender.computed_at), "announced": frames}


def _prefill(handoff: HandoffId, ids: tuple[int, ...], to: WorkerRef) -> worker_pb2.RouterCommand:
    message = worker_pb2.Prefill(
        handoff=convert.handoff_to_pb(handoff), spec=convert.spec_to_pb(_spec(ids, STEPS)), to=convert.ref_to_pb(to)
    )
    return worker_pb2.RouterCommand(prefill=message)


def _spec(ids: tuple[int, ...], max_tokens: int) -> SequenceSpec:
    return SequenceSpec(ids, Sampling(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True))


def load(setup: Setup) -> tuple[Answer, Mapping[str, Handler]]:
    """Return the version and the handlers for `serve`."""
    torch.set_num_threads(setup.threads)
    prefill = Prefill(setup)
    version = f"{baton.__version__} (torch {torch.__version__})"
    return {"version": version}, {"open": prefill.open, "close": prefill.close, "prompt": prefill.prompt}


if __name__ == "__main__":
    serve(load)
