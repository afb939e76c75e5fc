"""The snapshot that policies choose from: all workers of a role as columns of numbers, so a choice is a few operations.

`WorkerView` is the router's state of one worker; `fleet.py` writes it into the rows. No network, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from baton.core import Load, WorkerInfo

Value = TypeVar("Value")
Column = NDArray[np.float64]
Rows = NDArray[np.intp]


class Facts(NamedTuple, Generic[Value]):
    """One worker in numbers, or all workers of a role as columns. Costs are in seconds, and 0 while unknown."""

    able: Value  # 1 if it may get a request
    requests: Value  # the larger of the worker's report (all routers) and what this router sent
    dispatched: Value  # by this router
    backlog: Value  # prompt tokens ahead of a new request
    capacity: Value  # decode: positions for a new request; inf: always asked; -1: not able
    available: Value  # free or cached blocks
    kv_tokens: Value  # decode: positions held by running or reserved requests
    group: Value  # number of its fingerprint, from 0
    order: Value  # position by worker id
    token_bytes: Value  # of KV
    step_s: Value  # per step
    token_s: Value  # per token in it
    context_s: Value  # per position that one of its tokens attends to
    queued_s: Value  # per waiting prompt token ahead of a new request
    prompt_step_s: Value  # decode: prompts in a step, on top of decoding; likewise below
    prompt_token_s: Value
    prompt_context_s: Value


Loaded = tuple[float, float, float, float, float, float, float]  # the first of `Facts`, up to `kv_tokens`
BLANK = Facts(*(0.0,) * 4, -1.0, *(0.0,) * 12)
_FIRST = 8  # rows
_FEW = 8  # below this number of bits, a loop is faster


class Side:
    """All workers of one role. A worker keeps its row; rows without a worker are never `able`."""

    def __init__(self) -> None:
        self._table = np.tile(np.array(BLANK)[:, None], _FIRST)
        self._vacant: list[int] = []
        self._end = 0
        self.slots = np.zeros(_FIRST, np.intp)  # in the prefix index; 0 if not there
        self.bits = np.zeros(_FIRST, np.intp)  # bitwise compatible workers have equal numbers; 0 means none
        self.at: Facts[Column] = Facts(*self._table[:, :0])

    def __len__(self) -> int:
        return self._end

    def add(self) -> int:
        if self._vacant:
            return self._vacant.pop()
        if self._end == self._table.shape[1]:
            self._table = np.hstack([self._table, np.tile(np.array(BLANK)[:, None], self._end)])
            self.slots = np.concatenate([self.slots, np.zeros(self._end, np.intp)])
            self.bits = np.concatenate([self.bits, np.zeros(self._end, np.intp)])
        self._end += 1
        self.at = Facts(*self._table[:, : self._end])
        return self._end - 1

    def put(self, row: int, facts: Facts[float]) -> None:
        self._table[:, row] = facts

    def put_load(self, row: int, loaded: Loaded) -> None:
        self._table[: len(loaded), row] = loaded

    def hide(self, row: int) -> None:
        """Have no policy choose this row until its load is put again."""
        self.at.able[row], self.at.capacity[row] = 0.0, -1.0

    def facts(self, row: int) -> Facts[float]:
        return Facts(*self._table[:, row].tolist())

    def drop(self, row: int) -> None:
        self.put(row, BLANK)
        self.slots[row] = self.bits[row] = 0
        self._vacant.append(row)

    def cached(self, by_slot: Column | None) -> Column:
        """Convert cached tokens by slot of the prefix index to cached tokens by row."""
        if by_slot is None:
            return np.zeros(self._end)
        return by_slot[self.slots[: self._end]]


@dataclass(slots=True)
class Snapshot:
    """All inputs of a choice besides the request. `groups` is the number of fingerprints."""

    prefill: Side = field(default_factory=Side)
    decode: Side = field(default_factory=Side)
    groups: int = 0
    byte_s: float = 1e-9  # seconds to move one byte of KV
    slo_itl_s: float = np.inf
    chunk: float = np.inf  # tokens that a decode worker computes per step

    def has_capacity(self, tokens: int) -> bool:
        """Return whether any decode worker has capacity for `tokens`. If none has, no policy needs to run."""
        return bool(np.count_nonzero(self.decode.at.capacity > tokens))


@dataclass(frozen=True, slots=True)
class Ask:
    """The request as policies see it. `tokens` are known; `turn` counts the placements made before it. `keep` is the
    only prefill row allowed. `prefill_cached` and `decode_cached` are its cached leading tokens by row. `bits` are the
    compatibility numbers allowed for a deterministic request; both workers of a pair must have the same.
    """

    tokens: int
    prefill_cached: Column
    decode_cached: Column
    turn: int = 0
    keep: int | None = None
    bits: Sequence[int] | None = None


def spread(levels: Iterable[tuple[int, int]], block_size: int, into: Column) -> None:
    """Write the tokens of each level of `PrefixIndex.leading` into the slots of its bits."""
    size = len(into) // 8 + 1
    slots: list[int] = []
    tokens: list[int] = []
    for bits, count in levels:
        if bits.bit_count() > _FEW:
            flags = np.unpackbits(np.frombuffer(bits.to_bytes(size, "little"), np.uint8), bitorder="little")
            into[flags[: len(into)].view(np.bool_)] = count * block_size
            continue
        left = bits
        while left:
            slots.append(left.bit_length() - 1)
            tokens.append(count * block_size)
            left ^= 1 << slots[-1]
    into[slots] = tokens


@dataclass(slots=True)
class WorkerView:
    """The router's state of one worker: its last report, and what was sent since. Worker streams and placements write
    it and notify the pool.
    """

    info: WorkerInfo
    load: Load = field(default_factory=Load)
    dispatched: int = 0  # this router's requests on it
    queued_tokens: int = 0  # prefill: dispatched prompt tokens without a first token yet
    pending_blocks: int = 0  # decode: requested blocks that its reports do not contain yet
    full: bool = False  # it refused for lack of capacity since its last report

    @property
    def prefill_backlog(self) -> int:
        """Prompt tokens ahead of a new request: the larger of its report (all routers) and what this router sent."""
        return max(self.load.queued_tokens, self.queued_tokens)

    @property
    def requests(self) -> int:
        """Requests on it: the larger of its report (all routers) and what this router sent."""
        return max(self.load.running + self.load.waiting, self.dispatched)

    @property
    def capacity_blocks(self) -> float:
        """Blocks available to a new request, less one per running request to grow. Infinity if this router has no
        request there: then the worker's own answer counts, also "this can never fit".
        """
        if not self.dispatched:
            return math.inf
        return self.load.blocks.available - self.pending_blocks - self.load.running

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that a decode worker reserves for `tokens` known tokens and one more."""
        return self.info.layout.blocks_for(tokens + 1)


def has_pair(prefill: Sequence[WorkerView], decode: Sequence[WorkerView], *, bitwise: bool = False) -> bool:
    """Return whether any two can hand over, whatever their capacity. `bitwise` requires bitwise compatible results."""
    left, right = (
        {(view.info.fingerprint, bitwise and view.info.determinism) for view in views} for views in (prefill, decode)
    )
    return bool(left & right)


def misfit(info: WorkerInfo, others: Sequence[WorkerInfo]) -> str:
    """Return why `info` can hand over to none of `others` or take from none. "" if it can or there are none."""
    others = [other for other in others if other.role is not info.role]
    if not others or any(other.fingerprint == info.fingerprint for other in others):
        return ""
    other = others[0]
    for what, mine, theirs in (
        ("KV dtype", info.layout.dtype, other.layout.dtype),
        ("model", info.model, other.model),
        ("KV layout", info.layout.wire, other.layout.wire),
    ):
        if mine != theirs:
            return f"{what} {mine}, {other.ref.worker_id} has {theirs}"
    return f"weights or config differ from those of {other.ref.worker_id}"
