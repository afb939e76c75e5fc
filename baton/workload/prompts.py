"""The tokens of prompts that nobody wrote: random, the same for the same seed, and alike where a trace says so."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baton.workload.arrival import Arrival

_OWN, _BLOCK = 0, 1


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids below `vocab_size`. The seed must not be negative."""

    vocab_size: int
    seed: int

    def tokens(self, arrival: Arrival, number: int) -> list[int]:
        """`arrival.prompt_tokens` ids. Request `number` has the same ones whatever the others are."""
        found: list[int] = []
        for block in arrival.blocks:
            found += self._drawn(_BLOCK, block, min(arrival.block_tokens, arrival.prompt_tokens - len(found)))
        return found + self._drawn(_OWN, number, arrival.prompt_tokens - len(found))

    def _drawn(self, kind: int, key: int, count: int) -> list[int]:
        if count <= 0:
            return []
        drawn: list[int] = np.random.default_rng((self.seed, kind, key)).integers(self.vocab_size, size=count).tolist()
        return drawn
