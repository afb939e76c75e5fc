"""The measurement behind `baton profile`: candidate kernels compared on this machine.

Candidates alternate, so that other load on the machine affects all of them; medians decide. Another choice replaces
the static one only if it is faster by more than the noise.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from baton.engine.batch import Batch
from baton.engine.kernels.base import Linear
from baton.engine.kernels.cpu.attention import CompiledAttention
from baton.engine.kernels.cpu.kernel_choice import UNIFIED, Choice, Profile, static_choice
from baton.engine.kernels.cpu.ops import CompiledLinear, CpuKernels
from baton.engine.kernels.torch_reference import TorchLinear

ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
COLD_BYTES = 192 << 20  # total size of copies that alternate, so that weights are read from memory, not a cache
COLD_COPIES = 64
NOISE = 1.05
REPEATS = 5
BLOCK_SIZE = 16


class Point(NamedTuple):
    """Seconds per product of `rows` rows with a weight [width, K], by kernel."""

    width: int
    k: int
    rows: int
    flat_s: float
    tall_s: float
    torch_s: float

    def seconds(self, choice: Choice) -> float:
        return {"flat": self.flat_s, "tall": self.tall_s, "torch": self.torch_s}[choice.product(self.rows)]


def measure_linear(kernels: CpuKernels, width: int, k: int, rows: Iterable[int] = ROWS) -> list[Point]:
    """Measure the compiled kernels and torch's product for each number of rows."""
    count = max(2, min(COLD_COPIES, COLD_BYTES // (width * k * kernels.dtype.itemsize)))
    weights = torch.randn(width, k).to(kernels.dtype).repeat(count, 1, 1)
    kinds: list[list[Linear]] = [
        [CompiledLinear(kernels.products, weight, None, Choice(1 << 30, tall=True)) for weight in weights],
        [CompiledLinear(kernels.products, weight, None, Choice(0, tall=True)) for weight in weights],
        [TorchLinear(weight) for weight in weights],
    ]
    points = []
    for n in rows:
        x, out = torch.randn(n, k).to(kernels.dtype), torch.empty(n, width, dtype=kernels.dtype)
        several = max(1, min(count, 256 // n))
        seconds = alternate([partial(_each, layers[:several], x, out) for layers in kinds])
        points.append(Point(width, k, n, *(s / several for s in seconds)))
    return points


def best_choice(points: Sequence[Point]) -> Choice:
    """Return the choice with the least sum of log times, robust to outliers, or the static one if within noise."""

    def cost(choice: Choice) -> float:
        return sum(math.log(point.seconds(choice)) for point in points)

    static = static_choice(points[0].k)
    best = min((Choice(most, tall) for tall in (True, False) for most in (0, *(p.rows for p in points))), key=cost)
    return best if cost(best) + math.log(NOISE) < cost(static) else static


def measure_attention(kernels: CpuKernels, heads: int, kv_heads: int, dim: int, context: int = 1024) -> list[float]:
    """Measure one layer's attention for 8 decode sequences: seconds with a running and with a preset maximum."""
    rows, blocks = 8, -(-context // BLOCK_SIZE)
    cache = torch.randn(2, rows * blocks, BLOCK_SIZE, kv_heads, dim).to(kernels.dtype)
    query, out = torch.randn(rows, heads, dim).to(kernels.dtype), torch.empty(rows, heads * dim, dtype=kernels.dtype)
    none = torch.empty(0, dtype=torch.int64)
    starts = torch.tensor(list(accumulate([1] * rows, initial=0)), dtype=torch.int32)
    tables = torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks)
    lens = torch.full((rows,), context, dtype=torch.int32)
    batch = Batch(none, none, none, [1] * rows, [context] * rows, starts, lens, tables, none)
    kinds = [CompiledAttention(kernels.library, kernels.element, None, phi) for phi in (None, UNIFIED)]
    bound = [kind.bind(batch, BLOCK_SIZE, dim**-0.5) for kind in kinds]
    return alternate([partial(attend, query, cache[0], cache[1], out) for attend in bound])


def make_profile(points: Sequence[Point], attention: Sequence[float] | None) -> Profile:
    """Return the best profile for the measured points."""
    shapes = {(p.width, p.k) for p in points}
    choices = {shape: best_choice([p for p in points if (p.width, p.k) == shape]) for shape in shapes}
    faster = attention is not None and attention[1] * NOISE < attention[0]
    return Profile(choices, UNIFIED if faster else None)


def alternate(candidates: Sequence[Callable[[], object]], repeats: int = REPEATS) -> list[float]:
    """Return the median seconds of each candidate. They alternate, after one warm-up call each."""
    seconds: list[list[float]] = [[] for _ in candidates]
    for turn in range(repeats + 1):
        for taken, candidate in zip(seconds, candidates, strict=True):
            start = time.perf_counter()
            candidate()
            if turn:
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]


def _each(layers: Sequence[Linear], x: torch.Tensor, out: torch.Tensor) -> None:
    for layer in layers:
        layer(x, out)
