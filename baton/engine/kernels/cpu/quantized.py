"""The compiled product of int8 activations with packed int8 or int4 weights."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_long, c_void_p
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.engine.kernels.base import Scratch
from baton.engine.kernels.cpu.calls import Kernel, Recorder, struct_fields
from baton.engine.kernels.quantized import QuantizedWeight

PANEL = 16  # outputs, as in quantized.c


class QuantizeArgs(ctypes.Structure):
    """`quantize_args` of quantized.c."""

    _fields_: ClassVar = struct_fields((c_void_p, "x q scales sums"), (c_long, "rows k padded stride_x group"))


class ProductArgs(ctypes.Structure):
    """`product_args` of quantized.c."""

    _fields_: ClassVar = struct_fields(
        (c_void_p, "q scales sums w groups zeros factors bias y"),
        (c_long, "rows n padded group bits stride_y wide"),
    )


class QuantizedProducts:
    """The two functions of one element type, and the scratch in which activations are quantised."""

    def __init__(self, library: ctypes.CDLL, element: str, recorder: Recorder) -> None:
        self.quantize = Kernel(library, element, "quantize", recorder)
        self.multiply = Kernel(library, element, "quantized", recorder)
        self.scratch = Scratch(torch.int8, torch.device("cpu"))


class CompiledQuantized:
    """`Linear` for a quantised weight. Each row of x is rounded to int8 with its own scale, and sums are integers, so a
    row's bits depend on nothing else. `keep` returns the memory for a packed tensor.
    """

    def __init__(
        self,
        products: QuantizedProducts,
        weight: QuantizedWeight,
        bias: Tensor | None,
        keep: Callable[[Tensor], Tensor],
    ) -> None:
        self.width, self._products = weight.n, products
        padded, group = weight.levels.shape[1], weight.group
        extra = None if bias is None else _by_panel(bias.float())
        self._held = [
            keep(packed(weight)),
            *(None if part is None else _panels(part) for part in (weight.scales, weight.zeros)),
            _by_panel(weight.factors),
            extra,
        ]
        w, groups, zeros, factors, held = (None if part is None else part.data_ptr() for part in self._held)
        self._sizes = padded, padded // group
        self._x = QuantizeArgs(k=weight.k, padded=padded, group=group)
        self._args = ProductArgs(
            w=w, groups=groups, zeros=zeros, factors=factors, bias=held,
            n=weight.n, padded=padded, group=group, bits=weight.bits,
        )  # fmt: skip

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        rows, (padded, groups), take, threads = (
            len(x),
            self._sizes,
            self._products.scratch.take,
            torch.get_num_threads(),
        )
        q, scales = take("q", rows, padded), take("scales", rows, 1, torch.float32)
        sums = take("sums", rows, groups, torch.int32)
        first, args = self._x, self._args
        first.x, first.rows, first.stride_x = x.data_ptr(), rows, x.stride(0)
        first.q, first.scales, first.sums = q.data_ptr(), scales.data_ptr(), sums.data_ptr()
        self._products.quantize(first, threads)
        args.q, args.scales, args.sums, args.rows = first.q, first.scales, first.sums, rows
        args.y, args.stride_y, args.wide = out.data_ptr(), out.stride(0), out.dtype is not x.dtype
        self._products.multiply(args, threads)
        return out


def packed(weight: QuantizedWeight) -> Tensor:
    """Return the levels in panels of 16 outputs: uint8 [panels, padded / 4, 16, 4]. In 4 bits, a byte has the levels of
    inputs i (low half) and i + 4 of eight: [panels, padded / 8, 16, 4].
    """
    levels = F.pad(weight.levels, (0, 0, 0, -weight.n % PANEL))
    panels = len(levels) // PANEL
    if weight.bits == 8:
        return levels.view(panels, PANEL, -1, 4).permute(0, 2, 1, 3).contiguous()
    low, high = levels.view(panels, PANEL, -1, 2, 4).unbind(3)
    return (low | high << 4).permute(0, 2, 1, 3).contiguous()


def _panels(values: Tensor) -> Tensor:
    """Return one value per output and group, [n, groups], as [panels, groups, 16]."""
    whole = F.pad(values, (0, 0, 0, -len(values) % PANEL))
    return whole.view(-1, PANEL, whole.shape[1]).permute(0, 2, 1).contiguous()


def _by_panel(values: Tensor) -> Tensor:
    return F.pad(values, (0, -len(values) % PANEL)).contiguous()
