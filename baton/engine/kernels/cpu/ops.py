"""The compiled kernels behind the `Kernels` protocol, and the compiled copy of KV blocks.

Argument structures are made once and only changed fields are set, so that a call costs at most a few microseconds.
Cases that the C code does not support go to the torch kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_float, c_long, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.engine.batch import Batch
from baton.engine.kernels.base import ANY_ROWS, HeadNorms, Linear, Rotation, Splits
from baton.engine.kernels.cpu.attention import CompiledAttention, is_compiled, strides_of
from baton.engine.kernels.cpu.calls import Kernel, Recorder, struct_fields
from baton.engine.kernels.cpu.compiler import chosen_level, library_name, load_library
from baton.engine.kernels.cpu.kernel_choice import FLAT_ROWS, Choice, Profile
from baton.engine.kernels.cpu.quantized import CompiledQuantized, QuantizedProducts
from baton.engine.kernels.quantized import QuantizedWeight
from baton.engine.kernels.torch_reference import TorchLinear


class LinearArgs(ctypes.Structure):
    """`linear_args` of linear.c."""

    _fields_: ClassVar = struct_fields((c_void_p, "x w bias y"), (c_long, "rows n k stride_x stride_y wide"))


class NormArgs(ctypes.Structure):
    """`norm_args` of elementwise.c."""

    _fields_: ClassVar = struct_fields((c_void_p, "x out delta weight"), (c_long, "rows width"), (c_float, "eps"))


class RotateArgs(ctypes.Structure):
    """`rotate_args` of elementwise.c."""

    _fields_: ClassVar = struct_fields(
        (c_void_p, "qkv keys values cos sin q_norm k_norm slots"),
        (c_long, "rows heads kv_heads dim block_size k_block k_token k_head v_block v_token v_head levels"),
        (c_float, "eps"),
    )


class GateArgs(ctypes.Structure):
    """`gate_args` of elementwise.c."""

    _fields_: ClassVar = struct_fields((c_void_p, "gate_up out"), (c_long, "rows width activation"))


class BlocksArgs(ctypes.Structure):
    """`blocks_args` of blocks.c."""

    _fields_: ClassVar = struct_fields(
        (c_void_p, "planes blocks wire"), (c_long, "tensors layers layer_bytes block_size token_bytes begin end write")
    )


class BetweenArgs(ctypes.Structure):
    """`between_args` of blocks.c."""

    _fields_: ClassVar = struct_fields(
        (c_void_p, "source target theirs ours"),
        (c_long, "tensors layers source_layer target_layer source_size target_size token_bytes begin end"),
    )


class CompiledBlockCopy:
    """Copies of KV between the blocks of a cache and wire order, or those of two caches, callable by any thread."""

    def __init__(self, library: ctypes.CDLL, element: str) -> None:
        self._copy, self._between = library[f"blocks_{element}"], library[f"between_{element}"]

    def __call__(
        self, planes: Sequence[Tensor], layers: range, blocks: Sequence[int], span: range, wire: Tensor, *, write: bool
    ) -> None:
        """Copy positions `span` of the sequence in `blocks` to `wire`, uint8 [nbytes], or from it if `write`. Copies
        `layers` of all `planes`, contiguous [layers, total_blocks, block_size, kv_heads, head_dim], unchecked.
        """
        side = _Side.of(planes, layers, blocks, span)
        args = BlocksArgs(
            planes=ctypes.addressof(side.bases), blocks=side.blocks.ctypes.data, wire=wire.data_ptr(),
            tensors=len(planes), layers=len(layers), layer_bytes=side.layer_bytes,
            block_size=planes[0].shape[2], token_bytes=side.token_bytes,
            begin=span.start, end=span.stop, write=write,
        )  # fmt: skip
        self._copy(ctypes.byref(args))

    def between(
        self,
        source: Sequence[Tensor],
        target: Sequence[Tensor],
        layers: range,
        theirs: Sequence[int],
        ours: Sequence[int],
        span: range,
    ) -> None:
        """Copy positions `span` from blocks `theirs` of the planes `source` to blocks `ours` of `target`, unchecked."""
        a, b = _Side.of(source, layers, theirs, span), _Side.of(target, layers, ours, span)
        args = BetweenArgs(
            source=ctypes.addressof(a.bases), target=ctypes.addressof(b.bases),
            theirs=a.blocks.ctypes.data, ours=b.blocks.ctypes.data, tensors=len(source), layers=len(layers),
            source_layer=a.layer_bytes, target_layer=b.layer_bytes,
            source_size=source[0].shape[2], target_size=target[0].shape[2], token_bytes=a.token_bytes,
            begin=span.start, end=span.stop,
        )  # fmt: skip
        self._between(ctypes.byref(args))


class _Side(NamedTuple):
    """One cache of a copy: the first layer of each tensor, the blocks of the span, and sizes in bytes."""

    bases: ctypes.Array[ctypes.c_void_p]
    blocks: np.ndarray[Any, np.dtype[np.int64]]
    layer_bytes: int
    token_bytes: int

    @classmethod
    def of(cls, planes: Sequence[Tensor], layers: range, blocks: Sequence[int], span: range) -> _Side:
        _, _, block_size, kv_heads, head_dim = planes[0].shape
        layer_bytes, element = planes[0].stride(0) * planes[0].itemsize, planes[0].itemsize
        held = np.array(blocks[span.start // block_size : -(-span.stop // block_size)], dtype=np.int64)
        bases = (ctypes.c_void_p * len(planes))(*(plane.data_ptr() + layers.start * layer_bytes for plane in planes))
        return cls(bases, held, layer_bytes, kv_heads * head_dim * element)


ELEMENTS = {torch.bfloat16: "bf16", torch.float32: "f32"}
GATES = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
NO_GATE = -1


class CpuKernels:
    """Implementation of `baton.engine.kernels.base.Kernels` for one dtype. Raises Unavailable like `load_library`."""

    name = "compiled"

    def __init__(
        self, dtype: torch.dtype, profile: Profile, folder: Path | None = None, splits: Splits = "auto"
    ) -> None:
        element = ELEMENTS[dtype]
        library, self.level = load_library(element, folder), chosen_level()
        self.dtype, self.profile, self.splits = dtype, profile, splits
        self.shapes: set[tuple[int, int]] = set()  # of weights of the linear layers made so far
        self.recorder = recorder = Recorder()
        self.products = Products.of(library, element, recorder)
        self._norm, self._norm_args = Kernel(library, element, "norm", recorder), NormArgs()
        self._gate, self._gate_args = Kernel(library, element, "gate", recorder), GateArgs()
        self._rotate, self._rotate_args = Kernel(library, element, "rotate_and_store", recorder), RotateArgs()
        self.library, self.element = library, element
        self.make_calls = library[f"calls_{element}"]
        self.make_calls.restype = ctypes.c_long
        self._attention: dict[int | None, CompiledAttention] = {}  # key: window
        self._quantized = QuantizedProducts(library, element, recorder)
        self._quantized_shapes: set[str] = set()

    def begin(self, batch: Batch) -> None:
        self.products.fixed = batch.fixed

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> CompiledLinear:
        width, k = weight.shape
        self.shapes.add((width, k))
        return CompiledLinear(self.products, weight, bias, self.profile.choice(width, k))

    def quantized(
        self, weight: QuantizedWeight, bias: Tensor | None, keep: Callable[[Tensor], Tensor]
    ) -> CompiledQuantized:
        self._quantized_shapes.add(f"({weight.n}, {weight.k}): int{weight.bits} in groups of {weight.group}")
        return CompiledQuantized(self._quantized, weight, bias, keep)

    def rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        args = self._norm_args
        args.x, args.out, args.weight = x.data_ptr(), out.data_ptr(), weight.data_ptr()
        args.delta = None if delta is None else delta.data_ptr()
        args.rows, args.width, args.eps = x.numel() // x.shape[-1], x.shape[-1], eps
        self._norm(args, torch.get_num_threads())
        return out

    def rotate_and_store(
        self, qkv: Tensor, rotation: Rotation, norms: HeadNorms | None, slots: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        args, heads = self._rotate_args, qkv.shape[1] - 2 * keys.shape[2]
        args.qkv, args.slots = qkv.data_ptr(), slots.data_ptr()
        args.cos, args.sin = rotation.cos.data_ptr(), rotation.sin.data_ptr()
        args.keys, args.values = keys.data_ptr(), values.data_ptr()
        args.q_norm, args.k_norm, args.eps = None, None, 0.0
        if norms is not None:
            args.q_norm, args.k_norm, args.eps = norms.query.data_ptr(), norms.key.data_ptr(), norms.eps
        args.rows, args.heads, args.kv_heads, args.dim = qkv.shape[0], heads, keys.shape[2], qkv.shape[2]
        args.block_size, args.k_block, args.k_token, args.k_head = keys.shape[1], *strides_of(keys)
        args.v_block, args.v_token, args.v_head = strides_of(values)
        args.levels = keys.dtype is torch.int8
        self._rotate(args, torch.get_num_threads())
        return qkv[:, :heads]

    def gate(self, gate_up: Tensor, activation: str, out: Tensor) -> Tensor:
        args = self._gate_args
        args.gate_up, args.out = gate_up.data_ptr(), out.data_ptr()
        args.rows, args.width, args.activation = *out.shape, GATES[activation]
        self._gate(args, torch.get_num_threads())
        return out

    def gated(self, gate_up: Linear, x: Tensor, activation: str, scratch: Tensor, out: Tensor) -> Tensor:
        if isinstance(gate_up, CompiledLinear) and gate_up.is_tall(x.shape[0]):
            return gate_up.tall(x, out, GATES[activation])
        return self.gate(gate_up(x, scratch), activation, out)

    def grouped(self, weights: Tensor) -> None:
        del weights  # the host computes the products, so it may read the choice

    def by_row(self, layer: Linear) -> Linear | None:
        if isinstance(layer, CompiledQuantized):
            return layer  # for any number of rows
        if not isinstance(layer, CompiledLinear):
            return None
        return CompiledLinear(self.products, layer.weight, layer.bias, Choice(ANY_ROWS, tall=False))

    def steady_rows(self, heads: Sequence[int]) -> int:
        if not all(map(is_compiled, heads)):
            return 0
        return min(
            (_pinned(self.profile.choice(*shape)).flat_rows for shape in self.shapes),
            default=ANY_ROWS if self._quantized_shapes else 0,
        )

    def facts(self, rows: Sequence[int]) -> tuple[str, ...]:
        choices = [(shape, _pinned(self.profile.choice(*shape))) for shape in sorted(self.shapes)]
        products = [f"{shape} x {n}: {choice.product(n)}" for shape, choice in choices for n in rows]
        products += sorted(self._quantized_shapes)
        return (self.name, library_name(self.library), f"unified {self.profile.unified_max}", *products)

    @property
    def moves(self) -> int:
        """How often scratch of products moved, so that recorded addresses of it are invalid."""
        return self.products.moves + self._quantized.scratch.moves

    @property
    def fallbacks(self) -> int:
        """Rows of attention that left the unified maximum, over all forwards: see `CompiledAttention`."""
        return sum(attention.fallbacks for attention in self._attention.values())

    def attention(self, batch: Batch, block_size: int, window: int | None, scale: float) -> CompiledAttention:
        if window not in self._attention:
            self._attention[window] = CompiledAttention(
                self.library, self.element, window, self.profile.unified_max, by=self.splits, recorder=self.recorder
            )
        return self._attention[window].bind(batch, block_size, scale)


def _pinned(choice: Choice) -> Choice:
    """Use the flat kernel for at least FLAT_ROWS rows: in fixed forwards, its bits do not depend on the shape."""
    return choice._replace(flat_rows=max(choice.flat_rows, FLAT_ROWS))


@dataclass(slots=True)
class Products:
    """The two compiled products of one dtype, and the scratch in which they widen, transpose and pack."""

    flat: Kernel
    tall: Kernel
    flat_scratch: ctypes._NamedFuncPointer  # words of scratch per row
    tall_scratch: ctypes._NamedFuncPointer
    scratch: Tensor
    fixed: bool = False  # whether the current forward is fixed
    moves: int = 0  # of the scratch

    @classmethod
    def of(cls, library: ctypes.CDLL, element: str, recorder: Recorder) -> Products:
        flat, tall = (Kernel(library, element, name, recorder) for name in ("linear", "gemm"))
        sizes = library[f"linear_scratch_{element}"], library[f"gemm_scratch_{element}"]
        for size in sizes:
            size.restype = ctypes.c_long
        return cls(flat, tall, *sizes, torch.empty(0))

    def room(self, words: int) -> c_void_p:
        """Return the address of scratch of so many 32-bit words."""
        if self.scratch.numel() < words:
            self.scratch, self.moves = torch.empty(words), self.moves + 1
        return c_void_p(self.scratch.data_ptr())


class CompiledLinear:
    """`Linear` by number of rows: the flat kernel up to a limit, then the tall kernel or torch, as in `choice`."""

    def __init__(self, products: Products, weight: Tensor, bias: Tensor | None, choice: Choice) -> None:
        self.weight, self.bias, self.choice, self._steady = weight, bias, choice, _pinned(choice)
        self._products, self._torch = products, TorchLinear(weight, bias)
        self._args = LinearArgs(w=weight.data_ptr(), bias=None if bias is None else bias.data_ptr())
        self._args.n, self._args.k = self.width, _ = weight.shape
        self._row_words = int(products.flat_scratch(c_long(weight.shape[1])))

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        rows = x.shape[0]
        if self.is_tall(rows):
            return self.tall(x, out, NO_GATE)
        if rows > self._chosen.flat_rows:
            return self._torch(x, out)
        room = self._products.room(rows * self._row_words) if self._row_words else None
        self._products.flat(self._filled(x, out), room, torch.get_num_threads())
        return out

    def is_tall(self, rows: int) -> bool:
        return rows > self._chosen.flat_rows and self._chosen.tall

    @property
    def _chosen(self) -> Choice:
        return self._steady if self._products.fixed else self.choice

    def tall(self, x: Tensor, out: Tensor, activation: int) -> Tensor:
        """Compute the product by the tall kernel, and apply the gate unless `activation` is NO_GATE."""
        products, args, threads = self._products, self._filled(x, out), torch.get_num_threads()
        room = products.room(products.tall_scratch(ctypes.byref(args), threads, int(activation != NO_GATE)))
        products.tall(args, room, threads, activation)
        return out

    def _filled(self, x: Tensor, out: Tensor) -> LinearArgs:
        args = self._args
        args.x, args.y, args.rows = x.data_ptr(), out.data_ptr(), x.shape[0]
        args.stride_x, args.stride_y, args.wide = x.stride(0), out.stride(0), out.dtype is not x.dtype
        return args
