"""Step 5: handoffs between two processes on one GPU, and the end of a killed and of a frozen receiver.

It uses the product's `Sender`, `PeerService` and `make_transports`, whatever the transport does inside.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from baton.errors import HandoffError
from benchmarks.gpu_first.at import At, Outcome, require
from benchmarks.lib.protocol import Setup
from benchmarks.lib.random_weights import settings_of
from benchmarks.lib.shapes import Shape
from benchmarks.lib.transfer_lane import Lane, end_of
from benchmarks.lib.transfer_partner import Partner
from benchmarks.lib.transfer_peer import BLOCK_SIZE, blocks_of, make_kv
from kvtransfer.handoff import PushJob, TransferSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.engine.kv_cache import KVCache

LARGE = Shape(hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8)  # 131 KB of KV per token
SMALL = Shape(hidden=256, ffn=512, layers=2, heads=4, kv_heads=2)
DEADLINE_S, EXTRA_S = 5.0, 20.0
ROUNDS = 5


def run(at: At) -> Outcome:
    """Measure handoffs, then kill one receiver and freeze another during further handoffs."""
    tokens, settings = at.size(2048, 256), TransferSettings(at.size("cuda_ipc", "shm"), frame_deadline_s=DEADLINE_S)
    with _model_folder(at.size(LARGE, SMALL)) as folder:
        setup = Setup(str(folder), "bf16", 1, tokens + BLOCK_SIZE, str(folder))
        kv = make_kv(setup, str(at.device), exposed=True)
        seconds, killed_s = _ended_by(signal.SIGKILL, kv, setup, settings, tokens)
        _, frozen_s = _ended_by(signal.SIGSTOP, kv, setup, settings, 64)
    nbytes = tokens * kv.layout.layers * kv.layout.layer_token_bytes
    rate = nbytes / seconds / 1e9
    figures = {"gb_per_s": round(rate, 2), "handoff_ms": round(seconds * 1e3, 3), "mb": round(nbytes / 1e6, 1)}
    figures |= {"killed_s": round(killed_s, 2), "frozen_s": round(frozen_s, 2)}
    text = f"{settings.transport}: {rate:.1f} GB/s for {nbytes / 1e6:.0f} MB"
    return Outcome(f"{text}, killed peer noticed in {killed_s:.1f} s, frozen one in {frozen_s:.1f} s", figures)


def _ended_by(
    number: signal.Signals, kv: KVCache, setup: Setup, settings: TransferSettings, tokens: int
) -> tuple[float, float]:
    """Return the median seconds of a handoff, and the seconds from a signal to the receiver until one fails."""
    with closing(Partner("benchmarks.lib.transfer_peer", setup)) as partner:
        lane, blocks = Lane(kv, partner, settings, str(kv.device)), blocks_of(kv, seed=1)
        with closing(lane.sender):
            lane.wake(blocks)
            runs = [lane.hand_over(blocks, end_of(tokens), from_begin=False)["seconds"] for _ in range(ROUNDS)]
            require(bool(lane.sender.channels()), "no channel is open after handoffs")
            handoff = lane.new()
            told = lane.told[handoff.request_id]
            lane.sender.begin(PushJob(handoff, lane.to, tokens))
            require(told.accepted.wait(EXTRA_S), "the offer was not accepted")
            os.kill(partner.pid, number)
            began = time.monotonic()
            lane.sender.computed(handoff, blocks, kv.layout.layers, tokens)
            lane.sender.finish(handoff, end_of(tokens))
            ended = told.done.wait(2 * DEADLINE_S + EXTRA_S)
            seconds = time.monotonic() - began
    require(ended, f"a handoff to a receiver with {number.name} never ended")
    require(isinstance(told.outcome, HandoffError), f"the handoff ended with {told.outcome} after {number.name}")
    return median(runs), seconds


@contextmanager
def _model_folder(shape: Shape) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="baton-gpu-first-") as folder:
        settings = settings_of(shape, 8192) | {"tie_word_embeddings": False}
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        yield Path(folder)
