"""The check at load: packed chunks over paged KV against transformers' own forward, before any request is served."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import structlog
import torch
from torch import Tensor

from baton.clock import SystemClock
from baton.engine.determinism.checks import FixedRow, fixed_batch
from baton.engine.model_backend import ModelBackend
from baton.errors import CheckpointError

log = structlog.get_logger(__name__)
LENGTHS = (41, 7, 20)  # tokens of the sequences, so 68 in all
SEED, MOST = 5, 16  # MOST: tokens of a chunk
# Errors of a logit in standard deviations of its row. A best token that leads by more than twice that must be equal.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.6}
SHARE = {"float32": 0.0, "bfloat16": 0.4}  # of positions that may differ: bfloat16 often chooses another expert


def check(backend: ModelBackend, reference: Callable[[Tensor], Tensor], architecture: str) -> None:
    """Compare all logits with those of `reference`, which takes token ids [n]. Raises CheckpointError with the first
    position that differs.
    """
    clock, rng = SystemClock(), random.Random(SEED)
    began, dtype = clock.monotonic(), backend.layout.dtype
    lengths = [min(length, backend.max_model_len) for length in LENGTHS]
    sequences = [[rng.randrange(backend.vocab_size) for _ in range(length)] for length in lengths]
    found = computed(backend, sequences, rng)
    wrong = []
    for tokens, logits in zip(sequences, found, strict=True):
        wanted = reference(torch.tensor(tokens, device=backend.device)).float().cpu()
        wrong += [(at, len(tokens)) for at in differing(logits, wanted, TOLERANCE[dtype])]
    if len(wrong) > SHARE[dtype] * sum(lengths):
        where = "position {} of a sequence of {} tokens differs".format(*wrong[0])
        raise CheckpointError(f"it is not computed as transformers computes it: {where}")
    seconds = round(clock.monotonic() - began, 3)
    log.info("fallback_checked", architecture=architecture, tokens=sum(lengths), differing=len(wrong), seconds=seconds)


def computed(backend: ModelBackend, sequences: list[list[int]], rng: random.Random) -> list[Tensor]:
    """Return all logits of each sequence, from packed steps of a random chunk of each over paged KV."""
    size, found, done = backend.layout.block_size, [list[Tensor]() for _ in sequences], [0] * len(sequences)
    each = backend.layout.blocks_for(max(map(len, sequences)))
    kv = backend.make_cache(each * len(sequences))
    while left := [n for n, tokens in enumerate(sequences) if done[n] < len(tokens)]:
        rows = []
        for n in left:
            tokens = sequences[n][done[n] : done[n] + rng.randint(1, MOST)]
            rows.append(FixedRow(tokens, done[n], [*range(n * each, n * each + each)]))
            done[n] += len(tokens)
        counts = [len(row.tokens) for row in rows]
        batch = replace(fixed_batch(rows, [*range(sum(counts))], size, backend.device), fixed=False)
        for n, logits in zip(left, torch.split(backend.forward(batch, kv).float().cpu(), counts), strict=True):
            found[n].append(logits)
    return [torch.cat(logits) for logits in found]


def differing(found: Tensor, wanted: Tensor, tolerance: float) -> list[int]:
    """Return the positions with a logit that differs too much, or another best token although one leads clearly."""
    spread, best = wanted.std(-1), wanted.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * tolerance * spread
    close = (found - wanted).abs().amax(-1) <= tolerance * spread  # not for NaN
    return [int(at) for at in (~close | clear & (found.argmax(-1) != wanted.argmax(-1))).nonzero()]
