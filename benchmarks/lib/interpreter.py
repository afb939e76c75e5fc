"""Triton's interpreter, corrected so that bfloat16 is rounded and multiplied as on a GPU."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def rounded_as_on_a_gpu() -> Iterator[None]:
    """While it runs, round to the nearest bfloat16, and multiply bfloat16 in float32.

    Triton 3.7 truncates float32 to bfloat16, and multiplies the bits of bfloat16 as integers.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    convert, builder = interpreter._convert_float, interpreter.InterpreterBuilder
    dot = builder.create_dot

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source != tl.float32 or target != tl.bfloat16:
            return convert(data, source, target, mode)
        bits = np.ascontiguousarray(data, np.float32).view(np.uint32)
        nearest = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)
        return np.where(np.isnan(data), 0x7FC0, nearest >> 16).astype(np.uint16)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.view(np.uint16).astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def wide_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    with patch.object(interpreter, "_convert_float", rounded), patch.object(builder, "create_dot", wide_dot):
        yield
