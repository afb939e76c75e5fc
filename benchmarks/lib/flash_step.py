"""Whole forwards with each idea of FlashDecoding++ on and off, and the scores of the demo model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from baton.core import KVLayout
from baton.engine.kernels.cpu.kernel_choice import UNIFIED, Ideas, Profile
from baton.engine.kernels.cpu.ops import CpuKernels
from baton.engine.kv_cache import DTYPES
from baton.engine.models.checkpoint import Checkpoint, Weights
from baton.engine.models.config import read_config
from baton.engine.models.decoder import Decoder
from baton.engine.models.llama import Parts
from baton.engine.models.loading import TransformerBackend
from benchmarks.lib.device import batch_of
from benchmarks.lib.points import Point
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.random_weights import random_model, settings_of

if TYPE_CHECKING:
    from torch import Tensor

    from baton.engine.batch import Batch
    from baton.engine.kernels.base import Attention
    from benchmarks.lib.shapes import Shape

Timed = Callable[[Mapping[str, Callable[[], object]]], dict[str, list[float]]]
IDEAS = {
    "engine": Ideas(),
    "unified_max": Ideas(unified_max=True),
    "flat_gemm": Ideas(flat_gemm=False),
    "dispatch": Ideas(dispatch=False),
}
"""Each differs from the engine in one switch: the unified maximum is on, or one of the others is off."""
BLOCK, LOG2E, POSITIONS = 16, 1.4426950408889634, 8192
HOST = torch.device("cpu")
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def steps(
    shape: Shape, dtype: torch.dtype, profile: Profile, points: Sequence[str], timed: Timed
) -> Iterator[dict[str, Any]]:
    """Yield decode steps and prompts of a model with random weights, with each of IDEAS."""
    kernels = {name: CpuKernels(dtype, ideas.applied(profile)) for name, ideas in IDEAS.items()}
    settings = settings_of(shape, POSITIONS)
    models = {
        name: random_model(settings, device=HOST, dtype=NAMES[dtype], block_size=BLOCK, kernels=one)
        for name, one in kernels.items()
    }
    for name in points:
        point = Point.parse(name)
        queries, context = ([1] * point.batch, point.tokens) if point.batch else ([point.tokens], point.tokens)
        batch = batch_of(queries, [context] * len(queries), BLOCK, HOST)
        kv = models["engine"].make_cache(int(batch.block_tables.max()) + 1)
        for part in (kv.k, kv.v):
            part.normal_()
        before = kernels["unified_max"].fallbacks
        models["unified_max"].forward(batch, kv)
        count = kernels["unified_max"].fallbacks - before
        calls = {name: partial(model.forward, batch, kv) for name, model in models.items()}
        of = len(batch.token_ids) * shape.heads * shape.layers
        yield {"part": "step", "point": name, "count": count, "of": of, "seconds": timed(calls)}


class Recorded(CpuKernels):
    """Compiled kernels that keep the best score of each token and head, in powers of two."""

    best: list[Tensor]

    def attention(self, batch: Batch, block_size: int, window: int | None, scale: float) -> Attention:  # type: ignore[override]
        attend = super().attention(batch, block_size, window, scale)
        (context,) = batch.context_lens

        def run(query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Tensor:
            tokens, _, dim = query.shape
            k = keys[batch.block_tables[0].long()].flatten(0, 1)[:context].float()
            q = query.float().view(tokens, k.shape[1], -1, dim)
            scores = torch.einsum("tkgd,skd->kgts", q, k) * scale * LOG2E
            hidden = torch.ones(tokens, context, dtype=torch.bool).triu(context - tokens + 1)
            self.best.append(scores.masked_fill(hidden, -torch.inf).amax(-1).flatten())
            return attend(query, keys, values, out)

        return run


def demo_scores(dtype: torch.dtype) -> dict[str, Any]:
    """Return the fall-backs of models/demo over its held-out text, and the range of the best scores."""
    kernels = Recorded(dtype, Profile(unified_max=UNIFIED))
    kernels.best = []
    folder = ROOT / "models" / "demo"
    model, tokenizer = _loaded(kernels, dtype), Tokenizer.from_file(str(folder / "tokenizer.json"))
    for line in (ROOT / "models" / "heldout.jsonl").read_text().splitlines():
        sample = json.loads(line)
        ids = torch.tensor(tokenizer.encode(sample["prompt"] + sample["completion"]).ids)
        batch = replace(batch_of([len(ids)], [len(ids)], BLOCK, HOST), token_ids=ids)
        model.forward(batch, model.make_cache(int(batch.block_tables.max()) + 1))
    best = torch.cat(kernels.best)
    low, high = float(best.min()), float(best.max())
    return {"part": "demo", "count": kernels.fallbacks, "of": len(best), "lowest": low, "highest": high}


def _loaded(kernels: CpuKernels, dtype: torch.dtype) -> TransformerBackend:
    folder = ROOT / "models" / "demo"
    config = read_config(folder)
    parts = Parts(Weights(Checkpoint(folder), dtype, HOST), kernels)
    with closing(parts.weights):
        model = Decoder(config, parts)
        parts.weights.settle()
    return TransformerBackend(
        name="demo",
        layout=KVLayout(config.layers, config.kv_heads, config.head_dim, BLOCK, NAMES[dtype]),
        vocab_size=config.vocab_size,
        max_model_len=config.max_positions,
        device=HOST,
        fingerprint="demo",
        model=model,
    )
