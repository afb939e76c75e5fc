"""The compiled kernels behind the `Kernels` protocol.

A call costs a few microseconds at most: arguments lie in structures that are made once, and only what changes from
call to call is set. What the C code does not handle goes to the torch kernels.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from baton.engine.kernels.cpu.args import GateArgs, LinearArgs, NormArgs, RotateArgs, strides_of
from baton.engine.kernels.cpu.attention import CompiledAttention
from baton.engine.kernels.cpu.build import load_library
from baton.engine.kernels.plain import TorchKernels, TorchLinear

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from baton.engine.batch import Batch
    from baton.engine.kernels.base import HeadNorms, Rotation
    from baton.engine.kernels.cpu.profile import Profile

ELEMENTS = {torch.bfloat16: "bf16", torch.float32: "f32"}
GATES = {"silu": 0, "gelu_tanh": 1}


class CpuKernels:
    """Implements `baton.engine.kernels.base.Kernels` for one dtype. Raises Unavailable where it cannot be had."""

    name = "compiled"

    def __init__(self, dtype: torch.dtype, profile: Profile, folder: Path | None = None) -> None:
        element = ELEMENTS[dtype]
        library = load_library(element, folder)
        self.dtype, self.profile = dtype, profile
        self.shapes: set[tuple[int, int]] = set()  # of the weights of the linear layers made so far
        self._torch = TorchKernels()
        self.flat_function = library[f"linear_{element}"]
        self._norm, self._norm_args = library[f"norm_{element}"], NormArgs()
        self._gate, self._gate_args = library[f"gate_{element}"], GateArgs()
        self._rotate, self._rotate_args = library[f"rotate_and_store_{element}"], RotateArgs()
        self.library, self.element = library, element
        self._attention: dict[int | None, CompiledAttention] = {}  # by window

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> CompiledLinear:
        width, k = weight.shape
        self.shapes.add((width, k))
        return CompiledLinear(self.flat_function, weight, bias, self.profile.flat_rows(width, k))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        return self._normed(x, None, weight, eps, out)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        return self._normed(x, delta, weight, eps, out)

    def _normed(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        args = self._norm_args
        args.x, args.out, args.weight = x.data_ptr(), out.data_ptr(), weight.data_ptr()
        args.delta = None if delta is None else delta.data_ptr()
        args.rows, args.width, args.eps = x.numel() // x.shape[-1], x.shape[-1], eps
        self._norm(ctypes.byref(args), torch.get_num_threads())
        return out

    def rotate_and_store(
        self,
        qkv: Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        args, heads = self._rotate_args, qkv.shape[1] - 2 * keys.shape[2]
        args.qkv, args.slots = qkv.data_ptr(), slots.data_ptr()
        args.cos, args.sin = rotation.cos.data_ptr(), rotation.sin.data_ptr()
        args.keys, args.values = keys.data_ptr(), values.data_ptr()
        args.q_norm, args.k_norm, args.eps = None, None, 0.0
        if norms is not None:
            args.q_norm, args.k_norm, args.eps = norms.query.data_ptr(), norms.key.data_ptr(), norms.eps
        args.rows, args.heads, args.kv_heads, args.dim = len(qkv), heads, keys.shape[2], qkv.shape[2]
        args.block_size, args.k_block, args.k_token, args.k_head = keys.shape[1], *strides_of(keys)
        args.v_block, args.v_token, args.v_head = strides_of(values)
        self._rotate(ctypes.byref(args), torch.get_num_threads())
        return qkv[:, :heads]

    def gate(self, gate_up: Tensor, activation: str, out: Tensor) -> Tensor:
        if activation not in GATES:
            return self._torch.gate(gate_up, activation, out)
        args = self._gate_args
        args.gate_up, args.out = gate_up.data_ptr(), out.data_ptr()
        args.rows, args.width, args.activation = len(out), out.shape[1], GATES[activation]
        self._gate(ctypes.byref(args), torch.get_num_threads())
        return out

    def attention(self, batch: Batch, block_size: int, window: int | None, scale: float) -> CompiledAttention:
        if window not in self._attention:
            self._attention[window] = CompiledAttention(self.library, self.element, window, self.profile.unified_max)
        return self._attention[window].bind(batch, block_size, scale)


class CompiledLinear:
    """`Linear` by rows: the compiled kernel for at most `flat_rows`, torch's matrix product above."""

    def __init__(self, function: ctypes._NamedFuncPointer, weight: Tensor, bias: Tensor | None, flat_rows: int) -> None:
        self.weight, self.bias, self.flat_rows = weight, bias, flat_rows
        self._function, self._full = function, TorchLinear(weight, bias)
        self._args = LinearArgs(w=weight.data_ptr(), bias=None if bias is None else bias.data_ptr())
        self._args.n, self._args.k = weight.shape

    @property
    def width(self) -> int:
        return len(self.weight)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        if len(x) > self.flat_rows:
            return self._full(x, out)
        args = self._args
        args.x, args.y, args.rows = x.data_ptr(), out.data_ptr(), len(x)
        args.stride_x, args.stride_y, args.wide = x.stride(0), out.stride(0), out.dtype is not x.dtype
        self._function(ctypes.byref(args), torch.get_num_threads(), 1)
        return out
