"""Size of verify passes: measured by `baton profile`, and used if the cluster file leaves it open.

A small pass reads all weights for few tokens. A large one waits for sequences to fill it, and wastes more computation.
So `best` is the smallest size with a time per token that is close to the best.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import structlog
import torch

from baton.engine.batch import Batch
from baton.engine.determinism.checks import FixedRow, fixed_batch
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.kernels.cpu.tuning import alternate
from baton.engine.kv_cache import KVCache
from baton.engine.model_backend import ModelBackend

WINDOW = FixedShapes().tokens
TOTALS = (32, 64, 128, 256, 512)  # tokens of a pass: rows times WINDOW
CLOSE = 1.15  # factor of the best time per token that is still good
CONTEXT = 256  # tokens before a row's window

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class VerifyShapeTimes:
    """Seconds of a verify pass by its tokens. Up to `steady` tokens, decode steps can be exact; 0 means never."""

    seconds: Mapping[int, float]
    steady: int = 0

    def best(self, *, exact: bool) -> int:
        """Return the best size. If `exact`, keep decode steps exact if possible, because each saves a whole pass."""
        steady = {total: seconds for total, seconds in self.seconds.items() if exact and total <= self.steady}
        each = {total: seconds / total for total, seconds in (steady or self.seconds).items()}
        return min(total for total, seconds in each.items() if seconds <= CLOSE * min(each.values()))


def measure_passes(backend: ModelBackend, max_rows: int) -> VerifyShapeTimes:
    """Measure passes of up to `max_rows` rows. Makes a cache: the backend's previous one must not be used again."""
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
    """Return stored measurements, or None if there are none or the file is damaged."""
    try:
        stored = json.loads(path.read_text())
        seconds = {int(total): float(taken) for total, taken in stored["seconds"].items()}
        whole = seconds and all(t >= WINDOW and t % WINDOW == 0 and 0 < s < math.inf for t, s in seconds.items())
        if not whole:
            raise ValueError("it has no valid times of verify passes")
        return VerifyShapeTimes(seconds, int(stored["steady"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("profile_unreadable", path=str(path), error=str(error))
        return None


def save_passes(path: Path, passes: VerifyShapeTimes) -> None:
    """Write the measurements atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(asdict(passes), indent=1))
    scratch.replace(path)
