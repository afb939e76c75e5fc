"""The states of recurrent layers on several ranks: one memory file of rank 0, which all ranks map.

    row of a sequence:  state on rank 0 | state on rank 1 | ...

Each rank has a part of its own, so no two ranks write to one place, also if they share a key head or a group. Rank 0
reads and writes whole rows between forwards. Each rank writes its part before it gives its part of the layer's sum. So
all parts are written when `forward` returns on rank 0.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.kv_cache import StateMemory
from baton.engine.models.recurrent.spec import RecurrentSpec, state_of_rank, state_size
from baton.errors import ConfigError


class RankedStates(StateMemory):
    """States of ranks with layers of these `specs`, which are those of one rank."""

    def __init__(self, rows: Tensor, specs: Sequence[RecurrentSpec]) -> None:
        super().__init__(rows)
        self._specs = specs
        self._numbers = {spec: torch.stack([state_of_rank(spec, rank) for rank in range(spec.ranks)]) for spec in specs}
        self._sizes = {spec: int(numbers.max()) + 1 for spec, numbers in self._numbers.items()}

    def whole(self, row: Tensor) -> Tensor:
        state = torch.empty(sum(self._sizes[spec] for spec in self._specs))
        for numbers, own, part in self._layers(row, state):
            part[numbers] = own  # ranks that share numbers have equal ones
        return state

    def divided(self, state: Tensor) -> Tensor:
        row = torch.empty(self.rows.shape[1])
        for numbers, own, part in self._layers(row, state):
            own.copy_(part[numbers])
        return row

    def _layers(self, row: Tensor, state: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the numbers of each layer's state [ranks, n], its parts in a row [ranks, n], and in a whole state."""
        begin, first = 0, 0
        ranked = row.view(self._specs[0].ranks, -1)
        for spec in self._specs:
            end, last = begin + state_size(spec), first + self._sizes[spec]
            yield self._numbers[spec], ranked[:, begin:end], state[first:last]
            begin, first = end, last


def state_file(slots: int, ranks: int, width: int, key: str) -> int:
    """Return a descriptor of new, zeroed memory for `mapped_states`. Raises ConfigError, about `key`, if that fails."""
    nbytes = slots * ranks * width * torch.float32.itemsize
    try:
        with ExitStack() as failing:
            file = os.memfd_create("baton-states")
            failing.callback(os.close, file)
            os.posix_fallocate(file, 0, nbytes)  # an error now instead of SIGBUS later
            failing.pop_all()
    except OSError as error:
        raise ConfigError(f"{key}: no memory of {nbytes} bytes for states: {error}; set a smaller {key}") from error
    return file


def mapped_states(path: Path, slots: int, ranks: int, width: int) -> Tensor:
    """Return the states in a memory file: float32 [slots, ranks, width]. It stays mapped while it is used."""
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), slots * ranks * width * torch.float32.itemsize)
    return torch.frombuffer(memory, dtype=torch.float32).view(slots, ranks, width)
