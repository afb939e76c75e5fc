"""How large verify passes should be here: measured by `baton profile`, used where a cluster file leaves it open.

A pass of few tokens reads all weights for little; one of many waits for rows that fill it, and computes more in vain.
So the smallest one is taken whose time per token is close to the best.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import structlog
import torch

from baton.engine.determinism.checks import FixedRow, fixed_batch
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.kernels.cpu.tuning import alternate

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from baton.engine.batch import Batch
    from baton.engine.kv_cache import KVCache
    from baton.engine.model_backend import ModelBackend

WINDOW = FixedShapes().tokens
TOTALS = (32, 64, 128, 256, 512)  # tokens of a pass: rows times WINDOW
CLOSE = 1.15  # times as long for a token: still as good
CONTEXT = 256  # tokens before a row's window

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class VerifyShapeTimes:
    """Seconds of one verify pass by its tokens. `steady`: with at most so many, decode steps can be exact; 0: never."""

    seconds: Mapping[int, float]
    steady: int = 0

    def best(self, *, exact: bool) -> int:
        """The tokens that a pass should have; with `exact`, of those that leave decode steps exact, if there are any.

        An exact step saves the pass, which no larger one could outweigh.
        """
        steady = {total: seconds for total, seconds in self.seconds.items() if exact and total <= self.steady}
        each = {total: seconds / total for total, seconds in (steady or self.seconds).items()}
        return min(total for total, seconds in each.items() if seconds <= CLOSE * min(each.values()))


def measure_passes(backend: ModelBackend, max_rows: int) -> VerifyShapeTimes:
    """Of at most so many rows. Makes a cache: the backend's one before it must not be used any more."""
    start = max(0, min(CONTEXT, backend.max_model_len - WINDOW))
    totals = [total for total in TOTALS if total // WINDOW <= max(1, max_rows)]
    each = backend.layout.blocks_for(start + WINDOW)
    rows = [FixedRow([0] * WINDOW, start, list(range(at, at + each))) for at in range(0, totals[-1] * each, each)]
    kv = backend.make_cache(totals[-1] // WINDOW * each)
    batches = [
        fixed_batch(rows[: total // WINDOW], list(range(total)), backend.layout.block_size, backend.device)
        for total in totals
    ]
    seconds = alternate([partial(_forward, backend, kv, batch) for batch in batches])
    return VerifyShapeTimes(dict(zip(totals, seconds, strict=True)), backend.steady_rows())


@torch.inference_mode()
def _forward(backend: ModelBackend, kv: KVCache, batch: Batch) -> None:
    backend.forward(batch, kv)
    if backend.device.type == "cuda":
        torch.cuda.synchronize(backend.device)


def load_passes(path: Path) -> VerifyShapeTimes | None:
    """What was measured before; None where nothing was, or where the file is not whole."""
    try:
        stored = json.loads(path.read_text())
        seconds = {int(total): float(taken) for total, taken in stored["seconds"].items()}
        whole = seconds and all(t >= WINDOW and t % WINDOW == 0 and 0 < s < math.inf for t, s in seconds.items())
        if not whole:
            raise ValueError("no times of verify passes")
        return VerifyShapeTimes(seconds, int(stored["steady"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("profile_unreadable", path=str(path), error=str(error))
        return None


def save_passes(path: Path, passes: VerifyShapeTimes) -> None:
    """Write it in one piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(asdict(passes), indent=1))
    scratch.replace(path)
