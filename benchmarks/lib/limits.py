"""The machine's limit as a competitor: the least time of each point at speeds measured in this process.

A decode step reads each weight and the KV once, at the memory's speed. A prompt runs its operations at the speed of the
fastest matrix product among the model's shapes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from benchmarks.lib.bandwidth import Reader
from benchmarks.lib.isa import torch_isa
from benchmarks.lib.packed_products import packed_products
from benchmarks.lib.protocol import clock, serve
from benchmarks.lib.shapes import WEIGHT_BYTES, read_shape, stored

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.lib.protocol import Answer, Handler, Setup

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
GEMM_S = 0.1  # least duration of measuring one product


class Limits:
    """The two measurements, with the answers of an engine."""

    def __init__(self, setup: Setup) -> None:
        self._shape = read_shape(Path(setup.model))
        self._weights, self._dtype = setup.dtype, DTYPES[stored(setup.dtype)]
        weights = int(self._shape.read_params * WEIGHT_BYTES[setup.dtype])
        self._reader = Reader(weights, setup.threads, Path(setup.cache))

    def prefill(self, tokens: int, repeats: int) -> Answer:
        """Return the seconds of a prompt's operations at the best rate, and all rates in operations per second."""
        rates: dict[str, float] = {}
        for inputs, outputs in self._shape.linears:
            for name, product in self._products(tokens, inputs, outputs).items():
                best = min(_seconds_each(product) for _ in range(repeats))
                rates[f"{name} {tokens}x{inputs}x{outputs}"] = 2 * tokens * inputs * outputs / best
        return _answer(rates, self._shape.prefill_flops(tokens))

    def decode(self, batch: int, context: int, steps: int) -> Answer:
        """Return the seconds of a step's reads at the best rate, and all rates in bytes per second."""
        del steps
        return _answer(self._reader.measure(), self._shape.decode_bytes(batch, context, self._weights))

    def _products(self, rows: int, inputs: int, outputs: int) -> dict[str, Callable[[], object]]:
        wide_x, wide_weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
        x, weight = wide_x.to(self._dtype), wide_weight.to(self._dtype)
        products = _float_products(x, weight)
        if self._dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            products |= _float_products(wide_x, wide_weight)  # the fastest way where bfloat16 must be widened
        return products | packed_products(self._weights, x, weight)


def _float_products(x: torch.Tensor, weight: torch.Tensor) -> dict[str, Callable[[], object]]:
    name = "" if x.dtype == torch.bfloat16 else " float32"
    found: dict[str, Callable[[], object]] = {f"F.linear{name}": lambda: linear(x, weight)}
    if x.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, len(x))
        found[f"packed oneDNN{name}"] = lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return found


def _answer(rates: dict[str, float], work: int) -> Answer:
    best = max(rates, key=rates.__getitem__)
    return {"seconds": [work / rates[best]], "best": best, "rates": rates}


def _seconds_each(call: Callable[[], object]) -> float:
    call()
    calls, began = 0, clock()
    while (passed := clock() - began) < GEMM_S or calls < 2:
        call()
        calls += 1
    return passed / calls


def load(setup: Setup) -> tuple[Answer, Mapping[str, Handler]]:
    """Return the version and the handlers for `serve`."""
    torch.set_num_threads(setup.threads)
    limits = Limits(setup)
    about = {"version": f"torch {torch.__version__}", "isa": torch_isa()}
    return about, {"prefill": limits.prefill, "decode": limits.decode}


if __name__ == "__main__":
    serve(load)
