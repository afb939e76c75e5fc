"""Startup check: whether the rows of one sequence in a step have the bits that they have in steps of their own.

A step with proposals has several rows of a sequence, where steps without have one. Kernels may round these differently.
So the worker computes the same tokens both ways, at a short and a long context, and with other sequences.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.determinism.checks import FixedRow, fixed_batch
from baton.engine.model_backend import ModelBackend
from baton.engine.sampling.noise import mix64

MOST_ROWS = 64
PREFIX, LONG = 64, 1100  # positions before the checked tokens; a long context repeats the blocks of the prefix
TOKENS = 16  # that are checked: as many rows as a sequence has in a step


class EqualRows(NamedTuple):
    """Steps of up to `rows` rows give equal bits: fixed forwards if `fixed`, else any."""

    rows: int
    fixed: bool
    deterministic: bool = True  # fixed forwards are among them


@torch.inference_mode()
def equal_rows(backend: ModelBackend, max_batched_tokens: int) -> EqualRows | None:
    """Return the steps with equal bits, or None. Makes a cache: the backend's previous one must not be used again."""
    rows = min(backend.steady_rows(), MOST_ROWS, max_batched_tokens)
    if rows < 2 or backend.max_model_len < 4 * TOKENS:
        return None
    check = _RowsCheck(backend, rows)
    ordinary, fixed = (check.equal(fixed=each) for each in (False, True))
    return EqualRows(rows, not ordinary, fixed) if ordinary or fixed else None


class _RowsCheck:
    def __init__(self, backend: ModelBackend, rows: int) -> None:
        self._backend, self._rows, size = backend, rows, backend.layout.block_size
        most = backend.max_model_len - TOKENS
        self._prefix = min(PREFIX, most // 2)
        self._starts = sorted({self._prefix, min(LONG, most)})
        self._shared = list(range(-(-self._prefix // size)))
        each = 1 + -(-TOKENS // size)  # blocks with the checked tokens of one sequence
        self._own = [
            list(range(at, at + each)) for at in range(len(self._shared), len(self._shared) + rows * each, each)
        ]
        self._kv = backend.make_cache(len(self._shared) + rows * each)

    def equal(self, *, fixed: bool) -> bool:
        self._forward([FixedRow(_tokens(0, self._prefix, self._backend.vocab_size), 0, self._shared)], 0, fixed=fixed)
        return all(self._equal(start, fixed=fixed) for start in self._starts)

    def _equal(self, start: int, *, fixed: bool) -> bool:
        singles = [self._step(start, at, 1, 0, fixed=fixed) for at in range(TOKENS)]
        logits, cache = torch.cat(singles), self._bytes(start)
        for cut, others in ((TOKENS, 0), (TOKENS, self._rows), (1, self._rows), (3, self._rows // 2), (2, 3)):
            parts = [(0, cut), (cut, TOKENS - cut)] if cut < TOKENS else [(0, cut)]
            found = torch.cat([self._step(start, at, count, others, fixed=fixed) for at, count in parts])
            if not torch.equal(found, logits) or not torch.equal(self._bytes(start), cache):
                return False
        return True

    def _step(self, start: int, at: int, count: int, others: int, *, fixed: bool) -> Tensor:
        """Return the bits of the checked tokens from number `at` on, in a step of up to `others` more rows."""
        mine = self._row(0, start, at, count)
        left, rows = min(others, self._rows) - count, list[FixedRow]()
        while left > 0:
            size = min(1 + len(rows) % 3, left)
            rows.append(self._row(1 + len(rows), self._prefix, 0, size))
            left -= size
        rows.insert(len(rows) // 2, mine)
        before = sum(len(row.tokens) for row in rows[: rows.index(mine)])
        return self._forward(rows, count, before, fixed=fixed)

    def _row(self, sequence: int, start: int, at: int, count: int) -> FixedRow:
        whole = start // self._backend.layout.block_size
        table = [self._shared[block % len(self._shared)] for block in range(whole)] + self._own[sequence]
        return FixedRow(_tokens(1 + sequence, TOKENS, self._backend.vocab_size)[at : at + count], start + at, table)

    def _forward(self, rows: list[FixedRow], wanted: int, before: int = 0, *, fixed: bool) -> Tensor:
        """Return the bits of `wanted` logits from row `before` on: int32 [wanted, vocab]."""
        size, total = self._backend.layout.block_size, sum(len(row.tokens) for row in rows)
        width = max(len(row.blocks) for row in rows)
        padded = [row._replace(blocks=row.blocks + [0] * (width - len(row.blocks))) for row in rows]
        batch = fixed_batch(padded, list(range(total)), size, self._backend.device)
        logits = self._backend.forward(replace(batch, fixed=fixed), self._kv)
        return logits[before : before + wanted].view(torch.int32).clone()

    def _bytes(self, start: int) -> Tensor:
        """Return the KV of the checked tokens: uint8."""
        layout = self._backend.layout
        out = torch.empty(layout.layers * TOKENS * layout.layer_token_bytes, dtype=torch.uint8, device=self._kv.device)
        table = self._row(0, start, 0, 1).blocks
        self._kv.gather(range(layout.layers), table, start, start + TOKENS, out)
        return out


def _tokens(sequence: int, count: int, vocab_size: int) -> list[int]:
    return [mix64(sequence << 32 | position) % vocab_size for position in range(count)]
