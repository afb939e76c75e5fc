"""Measured process of `benchmarks/flashdecoding.py`: the ideas of FlashDecoding++ at one level and in one dtype.

The level of instructions is that of BATON_CPU_LEVEL. Candidates of a point alternate in rounds, each round in another
order. The last line of stdout is a JSON list of records; seconds of a record have one value for each round.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from typing import Any

import psutil
import torch

from baton.engine.kernels.base import ANY_ROWS, Linear
from baton.engine.kernels.cpu.attention import CompiledAttention
from baton.engine.kernels.cpu.compiler import Unavailable
from baton.engine.kernels.cpu.kernel_choice import UNIFIED, Choice, Profile
from baton.engine.kernels.cpu.ops import CompiledLinear, CpuKernels
from baton.engine.kernels.cpu.tuning import Point, best_choice
from baton.engine.kernels.torch_reference import TorchLinear
from baton.engine.kv_cache import DTYPES
from benchmarks.lib import flash_step
from benchmarks.lib.device import batch_of
from benchmarks.lib.protocol import clock
from benchmarks.lib.shapes import SIZES, TINY, Shape

Record = dict[str, Any]
MODELS = {"125M": SIZES["M"], "1.1B": SIZES["L"], "8B": Shape(4096, 14336, 32, 32, 8), "tiny": TINY["M"]}
LEAST_S = 2e-3  # shorter calls are repeated, because the clock and the call from Python would count
COLD_BYTES = 192 << 20  # of copies of a weight, which take turns, so that no cache has them
SHARE = 0.5  # of the available memory, at most, for the KV of a point
BLOCK, PADDED = 16, 64
HOST = torch.device("cpu")


@dataclass(frozen=True)
class Plan:
    """Points of a measured process. `heads` are those of the attention: query heads, KV heads, and their size.
    `prompts`: numbers of rows for dispatch only. `step`: the model of whole forwards.
    """

    dtype: str
    contexts: Sequence[int]
    rows: Sequence[int]
    heads: tuple[int, int, int]
    models: Sequence[str]
    product_rows: Sequence[int]
    prompts: Sequence[int]
    step: str
    points: Sequence[str]
    rounds: int


def in_turns(candidates: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each candidate by round, after one warm-up call each."""
    slowest = 0.0
    for work in candidates.values():
        work()
        begin = clock()
        work()
        slowest = max(slowest, clock() - begin)
    repeats, names = max(1, math.ceil(LEAST_S / max(slowest, 1e-6))), list(candidates)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            begin = clock()
            for _ in range(repeats):
                candidates[name]()
            found[name].append((clock() - begin) / repeats)
    return found


def cache(blocks: int, kv_heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return keys or values [blocks, BLOCK, kv_heads, dim], normal numbers that repeat."""
    some = torch.randn(min(blocks, 256), BLOCK, kv_heads, dim).to(dtype)
    return some.repeat(-(-blocks // len(some)), 1, 1, 1)[:blocks]


def attention(kernels: CpuKernels, plan: Plan) -> Iterator[Record]:
    """Yield decode attention of one layer with a running and with a unified maximum."""
    heads, kv_heads, dim = plan.heads
    for context, rows in product(plan.contexts, plan.rows):
        needed = 2 * rows * context * kv_heads * dim * kernels.dtype.itemsize
        at = {"context": context, "rows": rows}
        if needed > SHARE * psutil.virtual_memory().available:
            yield {"part": "skipped", **at, "why": f"KV of {needed / 2**30:.1f} GiB, half of the memory has less"}
            continue
        batch = batch_of([1] * rows, [context] * rows, BLOCK, HOST)
        keys, values = (cache(int(batch.block_tables.max()) + 1, kv_heads, dim, kernels.dtype) for _ in range(2))
        query = torch.randn(rows, heads, dim).to(kernels.dtype)
        out = torch.empty(rows, heads * dim, dtype=kernels.dtype)
        kinds = {"running": None, "unified": UNIFIED}
        made = {name: CompiledAttention(kernels.library, kernels.element, None, phi) for name, phi in kinds.items()}
        bound = {name: one.bind(batch, BLOCK, dim**-0.5) for name, one in made.items()}
        calls = {name: partial(one, query, keys, values, out) for name, one in bound.items()}
        yield {"part": "attention", **at, "seconds": in_turns(calls, plan.rounds)}
        if context == plan.contexts[0] and rows == plan.rows[-1]:
            yield from fallbacks(bound, (query, keys, values, out), plan.rounds)


def fallbacks(bound: Mapping[str, CompiledAttention], tensors: Sequence[torch.Tensor], rounds: int) -> Iterator[Record]:
    """Yield the counts and times of queries without a score out of range, with one such row, and with all."""
    query, *others = tensors
    for case, loud in (("random", 0), ("one row out of range", 1), ("all rows out of range", len(query))):
        asked = query.clone()
        asked[:loud] *= 1000
        calls = {name: partial(one, asked, *others) for name, one in bound.items()}
        unified, before = bound["unified"], bound["unified"].fallbacks
        calls["unified"]()
        count = unified.fallbacks - before
        of = query.shape[0] * query.shape[1]
        yield {"part": "fallback", "case": case, "count": count, "of": of, "seconds": in_turns(calls, rounds)}


def products(kernels: CpuKernels, width: int, k: int, rows: int) -> dict[str, Callable[[], object]]:
    """Return the ways to multiply some rows with cold weights [width, K]. Those of few rows are left out for many."""
    count = max(2, COLD_BYTES // (width * k * kernels.dtype.itemsize))
    weights = torch.randn(width, k).to(kernels.dtype).repeat(count, 1, 1)
    x, out = torch.randn(max(rows, PADDED), k).to(kernels.dtype), torch.empty(max(rows, PADDED), width)
    out, steps = out.to(kernels.dtype), range(rows)

    def way(make: Callable[[torch.Tensor], Linear], spans: Sequence[slice]) -> Callable[[], object]:
        layers = cycle([make(weight) for weight in weights])

        def run() -> None:
            layer = next(layers)
            for span in spans:
                layer(x[span], out[span])

        return run

    flat, tall = (partial(_compiled, kernels, limit) for limit in (ANY_ROWS, 0))
    whole = [slice(0, rows)]
    found = {"flat": way(flat, whole), "tall": way(tall, whole), "torch": way(TorchLinear, whole)}
    if 1 < rows <= PADDED:
        found["padded"] = way(tall, [slice(0, PADDED)])
        found["single"] = way(flat, [slice(i, i + 1) for i in steps])
    return found


def _compiled(kernels: CpuKernels, flat_rows: int, weight: torch.Tensor) -> CompiledLinear:
    return CompiledLinear(kernels.products, weight, None, Choice(flat_rows, tall=True))


def linear(kernels: CpuKernels, plan: Plan) -> Iterator[Record]:
    """Yield the products of one layer of each model."""
    for model in plan.models:
        for (k, width), rows in product(MODELS[model].linears, (*plan.product_rows, *plan.prompts)):
            seconds = in_turns(products(kernels, width, k, rows), plan.rounds)
            yield {"part": "linear", "model": model, "width": width, "k": k, "rows": rows, "seconds": seconds}


def profile_of(records: Sequence[Record]) -> Profile:
    """Return the profile of measured products: from every second round, so that the others can judge it."""
    points: dict[tuple[int, int], list[Point]] = {}
    for each in (each for each in records if each["part"] == "linear"):
        middle = [sorted(each["seconds"][name][::2]) for name in ("flat", "tall", "torch")]
        point = Point(each["width"], each["k"], each["rows"], *(times[len(times) // 2] for times in middle))
        points.setdefault((point.width, point.k), []).append(point)
    return Profile({shape: best_choice(found) for shape, found in points.items()})


def measured(plan: Plan) -> Iterator[Record]:
    """Yield all records of a plan."""
    dtype = DTYPES[plan.dtype]
    kernels = CpuKernels(dtype, Profile())
    yield from attention(kernels, plan)
    found = list(linear(kernels, plan))
    yield from found
    profile = profile_of(found)
    for (width, k), choice in profile.choices.items():
        static = Profile().choice(width, k)
        yield {"part": "choice", "width": width, "k": k, "measured": choice._asdict(), "static": static._asdict()}
    yield from flash_step.steps(MODELS[plan.step], dtype, profile, plan.points, partial(in_turns, rounds=plan.rounds))
    yield flash_step.demo_scores(dtype)


def main() -> None:
    """Measure what the parent asks for."""
    torch.manual_seed(0)
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked.pop("threads"))
    records = list[Record]()
    try:
        with torch.inference_mode():
            for record in measured(Plan(**asked)):
                print({key: value for key, value in record.items() if key != "seconds"}, file=sys.stderr)
                records.append(record)
    except Unavailable as why:
        records = [{"part": "unavailable", "why": str(why)}]
    print(json.dumps(records))


if __name__ == "__main__":
    main()
