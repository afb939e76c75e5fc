"""Forwards of few rows as one C call, without Python between kernels.

Calls of kernels depend on the number of rows, but hardly on the batch. Inputs, scratch and cache stay where they are.
So those of layers, last norm and head are recorded once for each number of rows, and calls.c makes them again. Results
have equal bits, because the calls are equal. CUDA graphs do the same on a GPU.

Before each replay, attention cuts the new batch into tasks. Layers that compute anything by torch are never replayed.
docs/design/kernels.md has the conditions.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from baton.engine.batch import Batch, Listener
from baton.engine.kernels.base import Attention, Scratch
from baton.engine.kernels.cpu.attention import CompiledAttention, Sizes
from baton.engine.kernels.cpu.calls import Call, Recorded
from baton.engine.kernels.cpu.ops import CpuKernels

MOST_ROWS = 64  # above that, products take so long that Python between them does not show


class Layers(Protocol):
    """All layers of one forward, last norm and head."""

    def __call__(self, on_layer: Listener | None) -> Tensor:
        """Return the logits. Call `on_layer` with each layer once its K and V are written."""


class _Key(NamedTuple):
    """The facts of a forward on which recorded calls depend, next to addresses that seldom change."""

    rows: int
    fixed: bool
    threads: int


@dataclass(frozen=True, slots=True, eq=False)
class _Tape:
    """The recorded calls of one forward."""

    calls: ctypes.Array[Call]
    recorded: Sequence[Recorded]  # owns the arguments
    marks: Sequence[tuple[int, int]]  # layers with the number of calls behind which their K and V are written
    attentions: Sequence[tuple[CompiledAttention, Sizes]]
    result: Tensor
    moves: int


class Replays:
    """The recorded forwards of one model, for one cache at a time."""

    def __init__(self, kernels: CpuKernels, scratch: Scratch) -> None:
        self._kernels, self._scratch = kernels, scratch
        self._tapes: dict[_Key, _Tape | None] = {}  # None: seen once
        self._never: set[_Key] = set()  # torch computes there
        self._cache: Callable[[], object] = lambda: None
        self.count = 0  # of replays

    def __call__(self, batch: Batch, cache: object, attends: Collection[Attention], layers: Layers) -> Tensor:
        """Do what `layers` would do for this batch and cache, and return its result. It uses these `attends`, and the
        addresses of its other inputs do not depend on the batch.
        """
        key = _Key(batch.slot_mapping.shape[0], batch.fixed, torch.get_num_threads())
        if key in self._never or not _is_simple(batch):
            return layers(batch.on_layer)
        if self._cache() is not cache:
            self._tapes.clear()
            self._cache = weakref.ref(cache)
        tape = self._tapes.get(key)
        if tape is not None and tape.moves == self._moves:
            return self._replay(tape, batch.on_layer)
        if key in self._tapes:
            return self._record(key, batch.on_layer, attends, layers)
        self._tapes[key] = None
        return layers(batch.on_layer)

    @property
    def _moves(self) -> int:
        return self._scratch.moves + self._kernels.moves

    def _replay(self, tape: _Tape, on_layer: Listener | None) -> Tensor:
        for attention, sizes in tape.attentions:
            attention.plan(sizes)
        begin, fallbacks = 0, 0
        if on_layer is not None:
            for end, layer in tape.marks:
                fallbacks += self._make(tape, begin, end)
                begin = end
                on_layer(layer)
        fallbacks += self._make(tape, begin, len(tape.calls))
        if fallbacks:
            tape.attentions[0][0].fallbacks += fallbacks
        self.count += 1
        return tape.result

    def _make(self, tape: _Tape, begin: int, end: int) -> int:
        first = ctypes.byref(tape.calls, begin * ctypes.sizeof(Call))
        return int(self._kernels.make_calls(first, ctypes.c_long(end - begin), torch.get_num_threads()))

    def _record(self, key: _Key, on_layer: Listener | None, attends: Collection[Attention], layers: Layers) -> Tensor:
        used = [attend for attend in attends if isinstance(attend, CompiledAttention)]
        foreign = len(used) < len(attends)  # a replay cannot cut the batch for it
        before, plans = self._moves, [attend.plans for attend in used]
        marks: list[tuple[int, int]] = []

        def listen(layer: int) -> None:
            marks.append((len(calls), layer))
            if on_layer is not None:
                with torch_computes.paused():
                    on_layer(layer)

        with _Computes() as torch_computes, self._kernels.recorder.recording() as calls:
            result = layers(listen)
        cuts = [attend.plans - count for attend, count in zip(used, plans, strict=True)]
        # Layers of several sizes that share an attention cut each batch anew.
        if torch_computes.found or foreign or max(cuts, default=0) > 1:
            self._never.add(key)
            return result
        planned = [(attend, attend.planned) for attend in used]
        attentions = [(attend, sizes) for attend, sizes in planned if sizes is not None]
        self._tapes[key] = _Tape(_as_array(calls), calls, marks, attentions, result, before)
        return result


def _is_simple(batch: Batch) -> bool:
    """Return whether the forward may consist of calls of kernels: few rows, and a logit row for each."""
    rows = batch.slot_mapping.shape[0]
    few = rows <= MOST_ROWS and rows == batch.logit_rows.shape[0]
    return few and batch.thinking is None and batch.states is None


def _as_array(calls: Sequence[Recorded]) -> ctypes.Array[Call]:
    made = [Call(ctypes.addressof(each.args), each.scratch, each.kind, each.activation) for each in calls]
    return (Call * len(made))(*made)


class _Computes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Finds whether torch computes anything. Views and uninitialised memory are nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found, self._is_paused = False, False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Find nothing in this context."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = func is torch.ops.aten.empty.memory_format or (func.is_view and _is_shared(args[0], result))
        self.found |= not is_view and not self._is_paused
        return result


def _is_shared(tensor: Tensor, result: Tensor | Sequence[Tensor]) -> bool:
    """Return whether the result of a view is in the tensor's memory. `flatten` copies if it cannot be."""
    first = result if isinstance(result, Tensor) else result[0]
    return first.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
