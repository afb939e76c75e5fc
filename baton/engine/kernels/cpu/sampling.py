"""The compiled draw: all rows of a step in one call, whatever their parameters."""

from __future__ import annotations

import ctypes
from ctypes import c_long, c_void_p
from typing import ClassVar

import torch
from torch import Tensor

from baton.engine.kernels.cpu.calls import struct_fields


class DrawArgs(ctypes.Structure):
    """`draw_args` of sampling.c."""

    _fields_: ClassVar = struct_fields((c_void_p, "scores parameters tokens scratch"), (c_long, "rows vocab stride"))


class CompiledDraw:
    """The `FusedDraw` of CPUs. Tokens are equal at all levels and for any number of rows and threads."""

    def __init__(self, library: ctypes.CDLL, element: str) -> None:
        self._draw, self._size = library[f"draw_{element}"], library[f"draw_scratch_{element}"]
        self._size.restype = c_long
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __call__(self, scores: Tensor, parameters: Tensor, *, drawn: bool, filtered: bool) -> Tensor:
        del drawn, filtered  # each row has its own parameters
        (rows, vocab), threads = scores.shape, torch.get_num_threads()
        needed = threads * int(self._size(c_long(vocab)))
        if len(self._scratch) < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        tokens = torch.empty(rows, dtype=torch.int64)
        args = DrawArgs(
            scores=scores.data_ptr(), parameters=parameters.data_ptr(), tokens=tokens.data_ptr(),
            scratch=self._scratch.data_ptr(), rows=rows, vocab=vocab, stride=scores.stride(0),
        )  # fmt: skip
        self._draw(ctypes.byref(args), threads)
        return tokens
