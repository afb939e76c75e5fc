"""Calls of compiled kernels, which a recorder can keep as data for calls.c."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_int, c_void_p
from typing import ClassVar, NamedTuple

KINDS = ("norm", "rotate_and_store", "gate", "linear", "gemm", "quantize", "quantized", "attention")  # as in calls.c


def struct_fields(*groups: tuple[type, str]) -> list[tuple[str, type]]:
    """Return the fields of a C structure, for groups of a type and names."""
    return [(name, kind) for kind, names in groups for name in names.split()]


class Call(ctypes.Structure):
    """`call_t` of calls.c."""

    _fields_: ClassVar = struct_fields((c_void_p, "args scratch"), (c_int, "kind activation"))


class Recorded(NamedTuple):
    """One call: a copy of its arguments, and the address of its scratch."""

    kind: int
    args: ctypes.Structure
    scratch: int | None
    activation: int


class Recorder:
    """The calls of one model's kernels, kept while it records."""

    def __init__(self) -> None:
        self.calls: list[Recorded] | None = None

    @contextmanager
    def recording(self) -> Iterator[list[Recorded]]:
        """Append each call to the list, until the end of the context."""
        calls: list[Recorded] = []
        self.calls = calls
        try:
            yield calls
        finally:
            self.calls = None


class Kernel:
    """One compiled kernel. It takes its arguments, then scratch if it is a product, and the number of threads. The
    product of many rows also takes an activation.
    """

    __slots__ = ("_function", "_kind", "_recorder")

    def __init__(self, library: ctypes.CDLL, element: str, name: str, recorder: Recorder) -> None:
        self._function, self._kind, self._recorder = library[f"{name}_{element}"], KINDS.index(name), recorder
        self._function.restype = ctypes.c_long if name == "attention" else None

    def __call__(self, args: ctypes.Structure, *more: c_void_p | int | None) -> int:
        """Call the kernel. Attention returns how many rows left the unified maximum, all others 0."""
        if self._recorder.calls is not None:
            self._record(self._recorder.calls, args, *more)
        return self._function(ctypes.byref(args), *more) or 0

    def _record(self, calls: list[Recorded], args: ctypes.Structure, *more: c_void_p | int | None) -> None:
        scratch = more[0].value if isinstance(more[0], c_void_p) else None
        activation = more[2] if len(more) > 2 and isinstance(more[2], int) else 0
        calls.append(Recorded(self._kind, type(args).from_buffer_copy(args), scratch, activation))
