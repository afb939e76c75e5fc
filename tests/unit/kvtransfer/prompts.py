"""Prompts computed layer by layer, as an engine does, on blocks that are NaN until computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from baton.engine.kv_cache import KVCache
from kvtransfer.handoff import PushJob, PushResult
from tests.unit.kvtransfer.support import LAYOUT, SETTINGS, Pair, make_end, make_kv, put, rows

POISON = float("nan")  # values that are not final or belong to others; they must never arrive
TOKEN = LAYOUT.layer_token_bytes
EAGER = replace(SETTINGS, frame_size=5 * TOKEN, coalesce_below=1, verify_kv=True)
RIGHT = make_kv(1)  # final values of all positions, in blocks 0, 1, 2, ...


def poisoned() -> KVCache:
    kv = make_kv(None)
    for tensor in kv.tensors:
        tensor.fill_(POISON)
    return kv


@dataclass
class Prompt:
    """One prompt of an engine, on a cache that is NaN wherever nothing was computed."""

    pair: Pair
    job: PushJob
    blocks: Sequence[int]

    @property
    def tokens(self) -> int:
        return self.job.known_tokens

    def begin(self) -> Prompt:
        self.pair.sender.begin(self.job)
        return self

    def layer(self, layer: int, begin: int, end: int) -> None:
        values, layers = rows(RIGHT, range(64), begin, end), slice(layer, layer + 1)
        put(self.pair.source, self.blocks, begin, end, values[:, layers], layers)
        self.pair.sender.computed(self.job.handoff, self.blocks, layer + 1, end)

    def chunk(self, begin: int, end: int, layers: int = LAYOUT.layers) -> None:
        for layer in range(layers):
            self.layer(layer, begin, end)

    def rest(self, begin: int, size: int = 1 << 16) -> PushResult:
        """Compute everything from `begin` on, in chunks of this size, and finish."""
        for start in range(begin, self.tokens, size):
            self.chunk(start, min(start + size, self.tokens))
        return self.finished()

    def withdraw(self) -> None:
        """Withdraw the blocks and overwrite them, as their next owner does."""
        self.pair.sender.withdraw(self.job.handoff)
        put(self.pair.source, self.blocks, 0, len(self.blocks) * LAYOUT.block_size, POISON)

    def finish(self) -> None:
        self.pair.sender.finish(self.job.handoff, make_end(self.tokens))

    def arrived(self) -> bool:
        """Return whether the receiver has the correct values of all positions due."""
        there = self.pair.table.blocks[self.job.handoff]
        due = rows(RIGHT, range(64), self.job.skip, self.tokens)
        return torch.equal(rows(self.pair.target, there, self.job.skip, self.tokens), due)

    def finished(self) -> PushResult:
        self.finish()
        return self.done()

    def done(self) -> PushResult:
        result = self.pair.reports.done(self.job.handoff)
        assert self.arrived()
        assert result.nbytes == (self.tokens - self.job.skip) * LAYOUT.layers * TOKEN
        return result


def prompt(pair, name: str, tokens: int, blocks: Sequence[int], target: Sequence[int], skip: int = 0) -> Prompt:
    return Prompt(pair, pair.reserve(name, tokens, target, skip=skip), blocks)


def fence(pair, name: str) -> None:
    """Push a handoff after all others. Afterwards, nothing of these is left to send."""
    prompt(pair, name, 1, [63], [63]).begin().rest(0)


def announced(pair, push: Prompt) -> list[tuple[int, int, int, int]]:
    return [(f.layer_begin, f.layer_end, f.begin, f.end) for f in pair.stream.frames(push.job.handoff)]
