"""States of recurrent layers, on the engine's side.

A sequence has one row of numbers in `States.memory`, in the slot of its blocks. A forward reads and updates it. It can
continue only from the state after the last computed token. So a prompt can use cached blocks only up to a *checkpoint*:
a copy of the state at the end of a block. Checkpoints are made each `EVERY` tokens, and after the last full block of a
prompt, where the next identical prompt begins.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from baton.core import RecurrentState, SequenceSpec, SequenceState
from baton.engine.batch import StateRows
from baton.engine.determinism.planner import VerifiedProgress
from baton.engine.kv_cache import KVCache
from baton.engine.sequence import UNLIMITED, ScheduledSequence, Sequence, SequencePolicy, VerifyWork

EVERY = 256  # tokens, rounded to whole blocks


class States:
    """The states of one engine's sequences, and up to `most` checkpoints, which cost as much memory each."""

    def __init__(self, kv: KVCache, slots: int, most: int) -> None:
        block_size, self._state_bytes = kv.layout.block_size, kv.layout.state_bytes
        self._held = kv.make_states(slots)
        self.memory = self._held.rows
        self.block_size, self.every = block_size, max(1, EVERY // block_size) * block_size
        self._most = most
        self._checkpoints: OrderedDict[bytes, Tensor] = OrderedDict()

    def begin(self, spec: SequenceSpec) -> Recurrence:
        """Return the policy of a sequence that is computed from its first token."""
        return Recurrence(self, (len(spec) - 1) // self.block_size * self.block_size if self._most else UNLIMITED)

    def adopt(self, spec: SequenceSpec, carried: SequenceState | None) -> Recurrence:
        """Return the policy of a sequence with KV and state from elsewhere. Raises ValueError if the state is missing
        or does not fit.
        """
        if not isinstance(carried, RecurrentState):
            raise ValueError("the model has recurrent layers, but the KV was sent without their state")
        facts = {
            "position": (carried.position, len(spec) - 1),
            "bytes": (len(carried.data), self._state_bytes),
        }
        if wrong := [f"{name} {given}, not {right}" for name, (given, right) in facts.items() if given != right]:
            raise ValueError(f"the state of the recurrent layers does not fit: {'; '.join(wrong)}")
        policy = self.begin(spec)
        policy.carried = self._held.divided(torch.frombuffer(bytearray(carried.data), dtype=torch.float32))
        return policy

    def state(self, sequence: Sequence) -> RecurrentState:
        """Return a copy of the state after the computed tokens, or the final ones of a deterministic sequence."""
        progress, saved = sequence.policy(VerifiedProgress), _recurrence(sequence).saved
        position = sequence.computed if progress is None else progress.final
        row = self.of(sequence) if saved is None else saved
        return RecurrentState(position, self._held.whole(row).cpu().numpy().tobytes())

    def of(self, sequence: Sequence) -> Tensor:
        """Return the row of a sequence, which must have blocks."""
        assert sequence.allocation is not None
        assert sequence.allocation.slot is not None
        return self.memory[sequence.allocation.slot]

    def ordinary(self, work: ListOf[ScheduledSequence], *, exact: bool) -> StateRows:
        """Return the rows of an ordinary forward. Those with candidates are saved first, as they are without them."""
        for item in work:
            progress = item.sequence.policy(VerifiedProgress)
            if progress is not None and not (exact and progress.confirmed(item.sequence.known)):
                _recurrence(item.sequence).save()
        return self._rows(work, fixed=exact)

    def fixed(self, windows: ListOf[VerifyWork]) -> StateRows:
        """Return the rows of a fixed forward of these windows. A verify pass begins with the states before it."""
        grid = windows[0].on_grid
        for window in () if grid else windows:
            _recurrence(window.sequence).rewind()
        work = [ScheduledSequence(window.sequence, window.count) for window in windows]
        starts = list(accumulate((window.size for window in windows[:-1]), initial=0))
        return self._rows(work, fixed=True, on_grid=grid, starts=starts)

    def settle(self, window: VerifyWork, final: int) -> int:
        """Return how many positions are final behind a fixed forward in which `final` ones were right. If others were
        not, the state is that before the window, and the next pass computes the right ones again.
        """
        policy = _recurrence(window.sequence)
        if final < window.start + window.count:
            policy.rewind()
            return window.start
        policy.saved = None
        return final

    def _rows(self, work: ListOf[ScheduledSequence], **options: Any) -> StateRows:
        slots = [item.sequence.allocation.slot for item in work if item.sequence.allocation is not None]
        found = [slot for slot in slots if slot is not None]
        assert len(found) == len(set(found)) == len(work)
        index = torch.tensor(found, device=self.memory.device)
        return StateRows(self.memory, found, [item.count for item in work], index, **options)

    def keep(self, block_hash: bytes, row: Tensor) -> None:
        """Make a checkpoint at the end of the block with this hash."""
        if block_hash not in self._checkpoints:
            self._checkpoints[block_hash] = row.clone()
        self._checkpoints.move_to_end(block_hash)
        if len(self._checkpoints) > self._most:
            self._checkpoints.popitem(last=False)

    def checkpoint(self, block_hash: bytes) -> Tensor | None:
        return self._checkpoints.get(block_hash)

    def used(self, block_hash: bytes) -> Tensor:
        """Return a checkpoint where a sequence begins. It is then the last one to go."""
        self._checkpoints.move_to_end(block_hash)
        return self._checkpoints[block_hash]

    def forget(self, sequence: Sequence) -> None:
        """Drop the checkpoints of a sequence, because its state is in doubt."""
        if sequence.chain is not None:
            for block in range(sequence.shareable // self.block_size):  # the chain ends before unverified candidates
                self._checkpoints.pop(sequence.chain.digest(block), None)


@dataclass(slots=True, eq=False)
class Recurrence(SequencePolicy):
    """The policy of a sequence with recurrent layers. Its forwards end at checkpoints, of which the one at position
    `last` is that of the prompt's end. `last` is UNLIMITED if no checkpoints are made.
    """

    states: States
    last: int
    carried: Tensor | None = None  # until it is in the slot
    sequence: Sequence | None = None
    hashes: list[bytes] = field(default_factory=list)  # of the blocks that were looked up
    saved: Tensor | None = None  # the state behind the final positions, while that in the slot has candidates

    def save(self) -> None:
        if self.saved is None and self.sequence is not None:
            self.saved = self.states.of(self.sequence).clone()

    def rewind(self) -> None:
        """Return to the saved state, or save it."""
        if self.saved is None:
            self.save()
        elif self.sequence is not None:
            self.states.of(self.sequence).copy_(self.saved)

    def preempted(self, sequence: Sequence) -> None:
        self.saved = None

    def most(self, computed: int) -> int:
        if self.last == UNLIMITED:
            return UNLIMITED
        regular = self.states.every - computed % self.states.every
        return min(regular, self.last - computed) if computed < self.last else regular

    def usable(self, hashes: Iterable[bytes]) -> Iterable[bytes]:
        self.hashes = list(hashes)
        return self.hashes

    def aligned(self, cached: int, block_size: int) -> int:
        while cached and self.states.checkpoint(self.hashes[cached // block_size - 1]) is None:
            cached -= block_size
        return cached

    def admitted(self, sequence: Sequence, block_size: int) -> None:
        """Begin with the checkpoint behind the cached blocks, or with zeros."""
        self.sequence, row = sequence, self.states.of(sequence)
        found = self.states.used(self.hashes[sequence.computed // block_size - 1]) if sequence.computed else None
        self.carried, self.hashes = None, []
        row.zero_() if found is None else row.copy_(found)

    def adopted(self, sequence: Sequence) -> None:
        self.sequence = sequence
        if self.carried is not None:
            self.states.of(sequence).copy_(self.carried)
        self.carried = None

    def published(self, hashes: ListOf[bytes], first: int, block_size: int) -> None:
        """Make a checkpoint if the computed tokens end with the last of these blocks, and one is due there."""
        sequence, end = self.sequence, (first + len(hashes)) * block_size
        if sequence is not None and sequence.computed == end and (end == self.last or end % self.states.every == 0):
            self.states.keep(hashes[-1], self.states.of(sequence))


def _recurrence(sequence: Sequence) -> Recurrence:
    policy = sequence.policy(Recurrence)
    assert policy is not None
    return policy
