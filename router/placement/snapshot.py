"""What the policies choose from: all workers of each role as columns of numbers, so that a choice is a few operations.

No network, no clock, no workers: `router/placement/fleet.py` fills in the rows.

What this router knows of a worker, and which workers fit each other.
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
    """One worker in numbers, or, column by column, all of a role. The costs are seconds, 0 while nothing is known."""

    # what every choice and every report changes
    able: Value  # 1: it may be given a request
    requests: Value  # on it: as the worker reports them (of all routers), or as we sent them
    dispatched: Value  # by this router
    backlog: Value  # prompt tokens before a newcomer
    room: Value  # decode: positions that a newcomer may have; inf: it is always asked; -1: it is not able
    available: Value  # blocks that are free or only cached
    kv_tokens: Value  # decode: positions held by what decodes, or is about to
    # what it is, and what was learned of it
    group: Value  # workers with equal fingerprints have equal numbers, from 0
    order: Value  # its place by worker id
    token_bytes: Value  # of KV
    step_s: Value  # a step, whatever is in it
    token_s: Value  # each token in it
    context_s: Value  # each position that one of its tokens attends to
    queued_s: Value  # each token of a prompt that waits before a newcomer
    prompt_step_s: Value  # decode: prompts in a step, beside what it decodes anyway; and so on
    prompt_token_s: Value
    prompt_context_s: Value


Loaded = tuple[float, float, float, float, float, float, float]  # the first of `Facts`, to `kv_tokens`
BLANK = Facts(*(0.0,) * 4, -1.0, *(0.0,) * 12)
_FIRST = 8  # rows
_FEW = 8  # bits that are faster found one by one


class Side:
    """All workers of one role. A worker keeps its row while it is there; rows without one are never `able`."""

    def __init__(self) -> None:
        self._table = np.tile(np.array(BLANK)[:, None], _FIRST)
        self._vacant: list[int] = []
        self._end = 0
        self.slots = np.zeros(_FIRST, np.intp)  # in the prefix directory, 0: it is not there
        self.bits = np.zeros(_FIRST, np.intp)  # workers whose results are alike to the bit have equal numbers; 0: none
        self.at: Facts[Column] = Facts(*self._table[:, :0])

    def __len__(self) -> int:
        """Rows, those without a worker among them."""
        return self._end

    def add(self) -> int:
        """A row for a worker."""
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
        """What is known of the worker now."""
        self._table[:, row] = facts

    def put_load(self, row: int, loaded: Loaded) -> None:
        """What there is of it that changes all the time."""
        self._table[: len(loaded), row] = loaded

    def facts(self, row: int) -> Facts[float]:
        """One worker's."""
        return Facts(*self._table[:, row].tolist())

    def drop(self, row: int) -> None:
        """The worker is gone."""
        self.put(row, BLANK)
        self.slots[row] = self.bits[row] = 0
        self._vacant.append(row)

    def cached(self, by_slot: Column | None) -> Column:
        """From cached tokens by slot of the prefix directory to cached tokens by row."""
        if by_slot is None:
            return np.zeros(self._end)
        return by_slot[self.slots[: self._end]]


@dataclass(slots=True)
class Snapshot:
    """Everything that a choice depends on, beside the request. `groups`: how many fingerprints there are."""

    prefill: Side = field(default_factory=Side)
    decode: Side = field(default_factory=Side)
    groups: int = 0
    byte_s: float = 1e-9  # to move a byte of KV
    slo_itl_s: float = np.inf
    chunk: float = np.inf  # tokens that a decode worker computes in one step

    def has_room(self, tokens: int) -> bool:
        """Could any decode worker take so many? While none can, nothing else is worth a look."""
        return bool(np.count_nonzero(self.decode.at.room > tokens))


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, as far as a choice depends on it: `tokens` are known, `turn` requests were given a pair before.

    `keep`: the only prefill row to take. `prefill_cached` and `decode_cached`: its leading tokens, by row. `bits`: of a
    deterministic one, the numbers of workers that may take it; the two of a pair have the same.
    """

    tokens: int
    prefill_cached: Column
    decode_cached: Column
    turn: int = 0
    keep: int | None = None
    bits: Sequence[int] | None = None


def spread(levels: Iterable[tuple[int, int]], block_size: int, into: Column) -> None:
    """Write the tokens of each level of `PrefixMap.leading` into the slots of its bits."""
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
    """What this router knows of one worker: its last report, and what was sent to it since.

    Links and claims write it, and tell the pool that they did (`router/placement/fleet.py`).
    """

    info: WorkerInfo
    load: Load = field(default_factory=Load)
    dispatched: int = 0  # requests that this router has on it
    queued_tokens: int = 0  # prefill: prompt tokens sent there, first token not seen yet
    pending_blocks: int = 0  # decode: blocks asked for, not answered yet, so not in its report
    full: bool = False  # it refused for lack of room since its last report

    @property
    def prefill_backlog(self) -> int:
        """Prompt tokens before a newcomer: as the worker reports them (of all routers), or as we sent them."""
        return max(self.load.queued_tokens, self.queued_tokens)

    @property
    def requests(self) -> int:
        """Requests on it: as the worker reports them (of all routers), or as we sent them."""
        return max(self.load.running + self.load.waiting, self.dispatched)

    @property
    def room(self) -> float:
        """Blocks that a newcomer may have, as far as we know; infinity: nothing of ours is there, so it is asked.

        A worker keeps a block to grow for each running request. One on which we have nothing is always asked:
        then its own answer counts, also "this can never fit".
        """
        if not self.dispatched:
            return math.inf
        return self.load.blocks.available - self.pending_blocks - self.load.running

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a decode worker reserves for `tokens` known tokens: room for one more."""
        return self.info.layout.blocks_for(tokens + 1)


def has_pair(prefill: Sequence[WorkerView], decode: Sequence[WorkerView], *, alike: bool = False) -> bool:
    """Could any two of them hand over to each other, room aside? `alike`: to the bit."""
    left, right = (
        {(view.info.fingerprint, alike and view.info.determinism) for view in views} for views in (prefill, decode)
    )
    return bool(left & right)


def misfit(info: WorkerInfo, others: Sequence[WorkerInfo]) -> str:
    """Why `info` can hand over to none of `others` (or take from none); "": it can, or nobody of them is there."""
    others = [other for other in others if other.role is not info.role]
    if not others or any(other.fingerprint == info.fingerprint for other in others):
        return ""
    other = others[0]
    for what, mine, theirs in (
        ("dtype", info.layout.dtype, other.layout.dtype),
        ("model", info.model, other.model),
        ("KV layout", info.layout.wire, other.layout.wire),
    ):
        if mine != theirs:
            return f"{what} {mine}, {other.ref.worker_id} has {theirs}"
    return f"weights or config differ from those of {other.ref.worker_id}"
