"""Runs a backend through Batch and KVCache with random chunks, random batches and scattered blocks."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from baton.engine.batch import Batch, StateRows
from baton.engine.kernels.kv_levels import to_levels
from baton.engine.kv_cache import KVCache
from baton.engine.model_backend import ModelBackend
from baton.engine.models.loading import load_model
from tests.unit.model.checkpoints import VOCAB


@dataclass
class Row:
    """One unfinished sequence: its tokens, the number of computed ones, and the received logits, by position."""

    tokens: list[int]
    target: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    slot: int = 0  # of its state
    logits: dict[int, torch.Tensor] = field(default_factory=dict)


def poisoned_cache(backend: ModelBackend, total_blocks: int) -> KVCache:
    """Return a cache full of NaN, so that reading a slot of another sequence gives NaN logits."""
    kv = backend.make_cache(total_blocks)
    nan = torch.full((kv.layout.head_dim,), torch.nan)
    for tensor in kv.tensors:
        tensor[:] = to_levels(nan) if tensor.dtype is torch.int8 else nan
    return kv


def greedy(backend: ModelBackend, prompts: Sequence[Sequence[int]], new: int, rng: random.Random) -> list[Row]:
    """Decode all prompts greedily. Each step takes some sequences, in any order, and a random chunk of each."""
    size = backend.layout.block_size
    rows = [Row(list(prompt), len(prompt) + new) for prompt in prompts]
    free = list(range(sum(backend.layout.blocks_for(row.target) for row in rows) + 3))
    rng.shuffle(free)
    kv = poisoned_cache(backend, len(free))
    memory = kv.make_states(len(rows) + 2).rows.fill_(torch.nan) if backend.layout.state_size else None
    for slot, row in enumerate(rows, 1):
        row.slot = slot
        if memory is not None:
            memory[slot] = 0
    while running := [row for row in rows if len(row.tokens) < row.target]:
        chosen = rng.sample(running, rng.randint(1, len(running)))
        chunks = [_chunk(row, rng) for row in chosen]
        for row, chunk in zip(chosen, chunks, strict=True):
            while len(row.blocks) * size < row.computed + chunk:
                row.blocks.append(free.pop())
        wanted = [[i for i in range(n) if i == n - 1 or rng.random() < 0.3] for n in chunks]
        logits = backend.forward(make_batch(chosen, chunks, wanted, size, memory), kv)
        _take(chosen, chunks, wanted, logits)
    return rows


def check_equal(folder: Path, reference: Any, bound: float = 1e-4) -> None:
    """Compare greedy logits and tokens with those of transformers."""
    for row in greedy(load_model(folder), prompts((1, 9, 40)), 6, random.Random(3)):
        expected = reference(torch.tensor([row.tokens[:-1]])).logits[0]
        assert row.tokens[-6:] == expected[-6:].argmax(-1).tolist()
        for position, logits in row.logits.items():
            assert (logits - expected[position]).std() < bound * expected.std()


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def _chunk(row: Row, rng: random.Random) -> int:
    left = len(row.tokens) - row.computed
    return rng.choice([left, 1, rng.randint(1, left), rng.randint(1, min(left, 40))])


def _take(rows: list[Row], chunks: list[int], wanted: list[list[int]], logits: torch.Tensor) -> None:
    lines = iter(logits.clone())  # a backend may write the next ones to the same place
    for row, chunk, offsets in zip(rows, chunks, wanted, strict=True):
        row.logits.update((row.computed + offset, next(lines)) for offset in offsets)
        row.computed += chunk
        if row.computed == len(row.tokens):
            row.tokens.append(int(row.logits[row.computed - 1].argmax()))


def make_batch(
    rows: list[Row], chunks: list[int], wanted: list[list[int]], block_size: int, memory: torch.Tensor | None = None
) -> Batch:
    """Return the batch that computes the next `chunks[i]` tokens of each row, with the logits of `wanted[i]`. States
    of recurrent layers are in `memory`.
    """
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    for row, chunk, offsets in zip(rows, chunks, wanted, strict=True):
        logit_rows += [len(ids) + offset for offset in offsets]
        for position in range(row.computed, row.computed + chunk):
            ids.append(row.tokens[position])
            positions.append(position)
            slots.append(row.blocks[position // block_size] * block_size + position % block_size)
    width, slots_of = max(len(row.blocks) for row in rows), [row.slot for row in rows]
    contexts = [row.computed + chunk for row, chunk in zip(rows, chunks, strict=True)]
    return Batch(
        token_ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        query_lens=chunks,
        context_lens=contexts,
        query_starts=torch.tensor(list(accumulate(chunks, initial=0)), dtype=torch.int32),
        kv_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=torch.tensor([row.blocks + [0] * (width - len(row.blocks)) for row in rows], dtype=torch.int32),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        states=None if memory is None else StateRows(memory, slots_of, chunks, torch.tensor(slots_of)),
    )


def assert_same_batch(found: Batch, wanted: Batch) -> None:
    for name in Batch.__slots__:
        left, right = getattr(found, name), getattr(wanted, name)
        if isinstance(right, torch.Tensor):
            assert (left.dtype, left.tolist()) == (right.dtype, right.tolist()), name
        else:
            assert left == right, name
