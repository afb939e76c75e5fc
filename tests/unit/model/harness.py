"""Runs a backend through Batch and KVCache with random chunks, random batches and scattered blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from baton.engine.batch import Batch
from baton.engine.kv_cache import KVCache
from baton.engine.model_backend import ModelBackend
from baton.engine.models.loading import load_model
from tests.unit.model.checkpoints import VOCAB, random_checkpoint, reload
from tests.unit.model.routing import assert_sure, routers


@dataclass
class Row:
    """One unfinished sequence: its tokens, the number of computed ones, and the received logits, by position."""

    tokens: list[int]
    target: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    logits: dict[int, torch.Tensor] = field(default_factory=dict)


def poisoned_cache(backend: ModelBackend, total_blocks: int) -> KVCache:
    """Return a cache full of NaN, so that reading a slot of another sequence gives NaN logits."""
    kv = backend.make_cache(total_blocks)
    for tensor in kv.tensors:
        tensor.fill_(float("nan"))
    return kv


def greedy(backend: ModelBackend, prompts: Sequence[Sequence[int]], new: int, rng: random.Random) -> list[Row]:
    """Decode all prompts greedily. Each step takes some sequences, in any order, and a random chunk of each."""
    size = backend.layout.block_size
    rows = [Row(list(prompt), len(prompt) + new) for prompt in prompts]
    free = list(range(sum(backend.layout.blocks_for(row.target) for row in rows) + 3))
    rng.shuffle(free)
    kv = poisoned_cache(backend, len(free))
    while running := [row for row in rows if len(row.tokens) < row.target]:
        chosen = rng.sample(running, rng.randint(1, len(running)))
        chunks = [_chunk(row, rng) for row in chosen]
        for row, chunk in zip(chosen, chunks, strict=True):
            while len(row.blocks) * size < row.computed + chunk:
                row.blocks.append(free.pop())
        wanted = [[i for i in range(n) if i == n - 1 or rng.random() < 0.3] for n in chunks]
        logits = backend.forward(make_batch(chosen, chunks, wanted, size), kv)
        _take(chosen, chunks, wanted, logits)
    return rows


class Variant(NamedTuple):
    """A kind of model. `seed`: of weights without near ties in routing, see `assert_sure`."""

    family: str
    settings: dict[str, Any]
    seed: int = 0

    def write(self, folder: Path, **more: Any) -> Any:
        return random_checkpoint(folder, self.family, seed=self.seed, **self.settings, **more)


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def check_logits(variant: Variant, folder: Path, lengths: Sequence[int], new: int, seed: int) -> None:
    """Check greedy tokens by induction: each is the argmax of transformers' logits after the tokens before it."""
    oracle, some = variant.write(folder), prompts(lengths)
    rows = greedy(load_model(folder), some, new, random.Random(seed))
    if routers(oracle):
        assert_sure(oracle, [row.tokens for row in rows])
    for prompt, row in zip(some, rows, strict=True):
        assert row.tokens[: len(prompt)] == list(prompt)
        logits = oracle(torch.tensor([row.tokens])).logits[0]
        assert row.tokens[len(prompt) :] == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        seen = sorted(row.logits)
        assert set(seen) >= set(range(len(prompt) - 1, len(row.tokens) - 1))
        torch.testing.assert_close(torch.stack([row.logits[i] for i in seen]), logits[seen], atol=1e-4, rtol=0)


def check_generate(variant: Variant, folder: Path, lengths: Sequence[int], new: int, seed: int) -> None:
    """Check greedy tokens against transformers' own cached decoding."""
    oracle, some = variant.write(folder), prompts(lengths)
    for prompt, row in zip(some, greedy(load_model(folder), some, new, random.Random(seed)), strict=True):
        mask = torch.ones(1, len(prompt))
        expected = oracle.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, attention_mask=mask)
        assert row.tokens == expected[0].tolist()


def check_bfloat16(variant: Variant, folder: Path, lengths: Sequence[int], new: int, seed: int) -> None:
    """Check that our bfloat16 logits are no farther from the float32 ones than those of transformers, up to chance.

    The few rows with another routing would decide a sum, so models with experts compare the median row.
    """
    variant.write(folder, dtype=torch.bfloat16)
    oracle, exact = (reload(folder, variant.family, dtype) for dtype in (torch.bfloat16, torch.float32))
    backend, same, ours, others = load_model(folder), *(list[torch.Tensor]() for _ in range(3))
    assert backend.layout.dtype == "bfloat16"
    for row in greedy(backend, prompts(lengths), new, random.Random(seed)):
        seen, tokens = sorted(row.logits), torch.tensor([row.tokens])
        mine = torch.stack([row.logits[i] for i in seen])
        theirs, right = oracle(tokens).logits[0, seen].float(), exact(tokens).logits[0, seen]
        ours.append((mine - right).abs().sum(-1))
        others.append((theirs - right).abs().sum(-1))
        same.append(mine.argmax(-1) == theirs.argmax(-1))
    sparse = any("experts" in name for name, _ in oracle.named_parameters())
    measure, factor, least = (torch.median, 1.2, 0.8) if sparse else (torch.sum, 1.1, 0.9)
    assert measure(torch.cat(ours)) < factor * measure(torch.cat(others))
    assert torch.cat(same).float().mean() > least


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


def make_batch(rows: list[Row], chunks: list[int], wanted: list[list[int]], block_size: int) -> Batch:
    """Return the batch that computes the next `chunks[i]` tokens of each row, with the logits of `wanted[i]`."""
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
    width = max(len(row.blocks) for row in rows)
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
    )


def assert_same_batch(found: Batch, wanted: Batch) -> None:
    for name in Batch.__slots__:
        left, right = getattr(found, name), getattr(wanted, name)
        if isinstance(right, torch.Tensor):
            assert (left.dtype, left.tolist()) == (right.dtype, right.tolist()), name
        else:
            assert left == right, name
