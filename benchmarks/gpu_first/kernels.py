"""Step 2: all kernels, compiled as the engine launches them, against float32. Results are NaN before each launch."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from baton.core import Sampling
from baton.engine.kernels.base import HeadNorms, Rotation
from baton.engine.kernels.gpu import triton_sampling
from baton.engine.kernels.gpu.ops import GpuKernels
from baton.engine.kernels.torch_reference import TorchKernels
from baton.engine.sampling.logits import Row
from baton.engine.sampling.sampler import Sampler
from benchmarks.gpu_first.at import At, Outcome, require
from benchmarks.lib.device import CASES, Case, attention_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
BLOCKS = (8, 16, 32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
TOLERANCE = {torch.bfloat16: 0.02, torch.float16: 0.005}  # for values of about 1
WINDOWS = (None, 37)
PROCESSES = 8  # that compile at the same time; each has a CUDA context
SAMPLED = 0.98  # share of rows with the token of the CPU, because exp and log are rounded otherwise


def run(at: At) -> Outcome:
    """Compare all kernels. Raises WrongResult with the worst of each kind."""
    attention = attention_errors(at)
    rows = row_errors(at)
    equal = equal_samples(at)
    wrong = [name for name, (error, most) in (attention | rows).items() if not error <= most]  # also if it is NaN
    require(not wrong, f"errors above the tolerance: {', '.join(wrong)}")
    require(equal >= SAMPLED, f"only {equal:.1%} of the sampled tokens are those of the CPU")
    worst = max(error / most for error, most in (attention | rows).values())
    figures = {name: error for name, (error, _) in (attention | rows).items()}
    text = f"{len(attention)} attentions and {len(rows)} other results, worst {worst:.2f} of its tolerance"
    return Outcome(f"{text}, {equal:.1%} of samples as on the CPU", figures | {"equal_samples": equal})


def attention_cases(*, every_block: bool) -> Iterator[tuple[Case, torch.dtype]]:
    """Yield cases with all head sizes, block sizes, dtypes and windows, groups of 1 to 8, and long contexts."""
    for number, dim in enumerate(HEAD_SIZES):
        for dtype in DTYPES if every_block else (DTYPES[number % 2],):
            for block in BLOCKS if every_block else (BLOCKS[number % len(BLOCKS)],):
                kv_heads = 1 + (number + 1) % 2
                heads = kv_heads * (number + 1)
                lengths = (1, 1, 20), (block + 1, 200, 170)
                yield Case(*lengths, heads, kv_heads, dim, block, WINDOWS[number % 2]), dtype
    if every_block:
        yield from ((case, dtype) for case in CASES for dtype in DTYPES)
    yield Case((1, 1), (5000, 3), 8, 1, 64, 16), DTYPES[0]
    yield Case((9, 1), (4700, 4099), 2, 1, 64, 256), DTYPES[1]


def attention_errors(at: At) -> dict[str, tuple[float, float]]:
    """Return error and tolerance of attention with the engine's kernels, and with Triton alone if they differ.

    On a GPU, several processes compile the kernels, because one process needs minutes.
    """
    cases = list(attention_cases(every_block=not at.dry))
    if at.dry:
        return _errors_of(at, cases)
    count = max(1, min(PROCESSES, (os.cpu_count() or 1) // 2))
    parts = [cases[first::count] for first in range(count)]
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(_errors_of, [at] * count, parts))
    return {name: error for result in results for name, error in result.items()}


def _errors_of(at: At, cases: Sequence[tuple[Case, torch.dtype]]) -> dict[str, tuple[float, float]]:
    chosen, found = at.kernels(), {}
    triton = GpuKernels(chosen.processors, generation=chosen.generation)
    for case, dtype in cases:
        name = f"{str(dtype)[6:]} {name_of(case)}"
        error = attention_error(case, triton, at.device, dtype, unwritten=torch.nan)
        found[f"triton {name}"] = error, TOLERANCE[dtype]
        if chosen.varlen is not None and case.block_size == BLOCKS[-1] and dtype is DTYPES[0]:
            found[f"flash {name}"] = attention_error(case, chosen, at.device, dtype), TOLERANCE[dtype]
    return found


def name_of(case: Case) -> str:
    """Return the shape of a case for people."""
    group, longest = case.heads // case.kv_heads, max(case.contexts)
    return f"heads of {case.dim}, group {group}, block {case.block_size}, window {case.window}, {longest} tokens"


def row_errors(at: At) -> dict[str, tuple[float, float]]:
    """Return error and tolerance of norms, gates, rotations and products of experts."""
    ours, plain, found = at.kernels(), TorchKernels(), {}
    for dtype in DTYPES:
        for name, compare in (("norm", norms), ("gate", gates), ("rotation", rotations), ("experts", experts)):
            results, expected = compare(ours, at, dtype), compare(plain, at, torch.float32, dtype)
            errors = [relative(a.float(), b) for a, b in zip(results, expected, strict=True)]
            error = float(torch.tensor(errors).max())  # NaN if any is
            found[f"{name} {str(dtype)[6:]}"] = error, TOLERANCE[dtype]
    return found


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the largest error in units of the largest value, which is about 1 or more."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1))


def drawn(at: At, seed: int, dtype: torch.dtype, through: torch.dtype, *shape: int) -> Tensor:
    """Return the same normal numbers for any dtype, rounded to `through`."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(through).to(at.device, dtype)


def norms(kernels: TorchKernels, at: At, dtype: torch.dtype, through: torch.dtype | None = None) -> list[Tensor]:
    """Return the norm of a sum, and the sum."""
    x, delta = (drawn(at, seed, dtype, through or dtype, 5, at.size(4096, 96)) for seed in (1, 2))
    out = torch.full_like(x, torch.nan)
    weight = drawn(at, 3, dtype, through or dtype, x.shape[1])
    return [kernels.rms_norm(x, delta, weight, 1e-5, out), x]


def gates(kernels: TorchKernels, at: At, dtype: torch.dtype, through: torch.dtype | None = None) -> list[Tensor]:
    """Return a gate for each activation."""
    found = []
    for activation in ("silu", "gelu", "gelu_tanh"):
        gate_up = drawn(at, 4, dtype, through or dtype, 3, 2 * 1030)
        out = torch.full((3, 1030), torch.nan, dtype=dtype, device=at.device)
        found.append(kernels.gate(gate_up, activation, out))
    return found


def rotations(kernels: TorchKernels, at: At, dtype: torch.dtype, through: torch.dtype | None = None) -> list[Tensor]:
    """Return queries, keys and values of heads with norms."""
    dim, rows, heads, kv_heads = 128, 5, 4, 2

    def numbers(seed: int, *shape: int) -> Tensor:
        return drawn(at, seed, dtype, through or dtype, *shape)

    rotation = Rotation(*(numbers(seed, rows, dim // 2) for seed in (5, 6)))
    weights = HeadNorms(numbers(7, dim), numbers(8, dim), 1e-6)
    keys, values = (torch.zeros(2, 8, kv_heads, dim, dtype=dtype, device=at.device) for _ in range(2))
    slots = torch.tensor([0, 7, 11, 3, 4], device=at.device)
    qkv = numbers(9, rows, heads + 2 * kv_heads, dim)
    return [kernels.rotate_and_store(qkv, rotation, weights, slots, keys, values), keys, values]


def experts(kernels: TorchKernels, at: At, dtype: torch.dtype, through: torch.dtype | None = None) -> list[Tensor]:
    """Return products with experts that have different numbers of rows."""
    counts, width, inner = [17, 0, 1, 40], 130, 65
    weights = drawn(at, 10, dtype, through or dtype, len(counts), width, inner) / inner**0.5
    x = drawn(at, 11, dtype, through or dtype, sum(counts), inner)
    if through is not None:  # the reference
        weights = weights.to(through).to(dtype)
        return [torch.cat([part @ each.T for part, each in zip(torch.split(x, counts), weights, strict=True)])]
    linear = kernels.grouped(weights)
    assert linear is not None
    chosen = torch.repeat_interleave(torch.tensor(counts)).to(at.device)
    out = torch.full((len(x), width), torch.nan, dtype=dtype, device=at.device)
    return [linear(x, linear.groups(chosen, fixed=False), out)]


def equal_samples(at: At) -> float:
    """Return the share of sampled tokens that the CPU draws too."""
    vocab, count = at.size(151_936, 5000), at.size(256, 10)
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.7}, {"top_p": 0.95}, {"min_p": 0.05}]
    kinds.append({"top_k": 20, "top_p": 0.9})
    samplings = [Sampling(seed=i, **kinds[i % len(kinds)]) for i in range(count)]
    rows = [Row((1, 2, 3), sampling, (0,), vocab, None) for sampling in samplings]
    logits = 4 * torch.randn(count, vocab, generator=torch.Generator().manual_seed(12))
    draw: Callable[..., Tensor] = triton_sampling.draw
    there, here = (sampler.sample(each, rows) for sampler, each in (
        (Sampler(draw), logits.to(at.device)), (Sampler(), logits)
    ))  # fmt: skip
    pairs = zip(there, here, strict=True)
    return sum(a.token_id == b.token_id for a, b in pairs) / count
