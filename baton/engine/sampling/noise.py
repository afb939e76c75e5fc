"""Integer hashes of Python ints and tensors, with equal bits on every device. Draws use them instead of a generator."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_MUL_A, _MUL_B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64
GOLDEN64 = 0x9E3779B97F4A7C15
_GOLDEN32 = 0x9E3779B1
_MURMUR = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))


def signed64(x: int) -> int:
    """Return the int64 with the bits of the unsigned `x` (modulo 2^64)."""
    x &= _MASK64
    return x - (1 << 64) if x >> 63 else x


def mix64(x: int) -> int:
    """Return splitmix64's finaliser, a bijection: each output bit depends on all 64 input bits."""
    x &= _MASK64
    x = (x ^ (x >> 30)) * _MUL_A & _MASK64
    x = (x ^ (x >> 27)) * _MUL_B & _MASK64
    return x ^ (x >> 31)


def mix64_tensor(x: Tensor) -> Tensor:
    """Return `mix64` of each element of an int64 tensor, with its bits read as unsigned."""
    if x.device.type != "cpu":
        x = (x ^ _shift_right(x, 30)) * signed64(_MUL_A)
        x = (x ^ _shift_right(x, 27)) * signed64(_MUL_B)
        return x ^ _shift_right(x, 31)
    bits = x.numpy().view(np.uint64)
    bits = bits ^ (bits >> np.uint64(30))
    bits *= np.uint64(_MUL_A)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(_MUL_B)
    bits ^= bits >> np.uint64(31)
    return torch.from_numpy(bits.view(np.int64))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # because torch shifts in copies of the sign


def columns_hash(keys: Tensor, columns: Tensor) -> Tensor:
    """Return 31 hash bits for each (row, column): int32 `[rows, n]`, from int32 `keys` `[rows, 2]` and `columns` `[n]`
    or `[rows, n]`. Two rounds of murmur3's finaliser hash the column, one with each half of the key.
    """
    x = columns * signed32(_GOLDEN32) ^ keys[:, :1]
    if x.device.type == "cpu":  # numpy has unsigned integers: a third fewer operations
        bits = x.numpy().view(np.uint32)
        spare = np.empty_like(bits)
        _mix32_array(bits, spare)
        bits ^= keys[:, 1:].numpy().view(np.uint32)
        _mix32_array(bits, spare)
    else:
        x = _mix32(_mix32(x) ^ keys[:, 1:])
    return x.bitwise_and_(0x7FFFFFFF)


def signed32(x: int) -> int:
    """Return the int32 with the bits of the unsigned `x` (modulo 2^32)."""
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >> 31 else x


def _mix32(x: Tensor) -> Tensor:
    for shift, factor in _MURMUR:
        x = (x ^ ((x >> shift) & ((1 << (32 - shift)) - 1))) * signed32(factor)
    return x


def _mix32_array(x: np.ndarray[Any, np.dtype[np.uint32]], spare: np.ndarray[Any, np.dtype[np.uint32]]) -> None:
    for shift, factor in _MURMUR:
        np.right_shift(x, shift, out=spare)
        np.bitwise_xor(x, spare, out=x)
        if factor != 1:
            np.multiply(x, factor, out=x)
