"""A fast path whose bits depend on load: greedy tokens differ between batch sizes, and fixed forwards do not."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from baton.engine.fixed import FixedShapes
from baton.engine.kernels.cpu.ops import CpuKernels
from baton.engine.kernels.cpu.profile import Choice, Profile
from baton.engine.model.build import TransformerBackend
from baton.engine.selfcheck import check_fixed
from benchmarks.lib.random_weights import random_model
from tests.support.compiled_kernels import compiled_or_skip
from tests.unit.model.harness import Row, make_batch

PROMPTS, PROMPT, NEW, VOCAB = 12, 300, 64, 4096
SETTINGS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def backend_of(by: Any) -> TransformerBackend:
    """A bfloat16 model whose products have the same bits in all batches: only attention may vary."""
    profile = Profile(static=Choice(1 << 20, tall=True))
    kernels = compiled_or_skip(lambda: CpuKernels(torch.bfloat16, profile, splits=by))
    device = torch.device("cpu")
    return random_model(SETTINGS, device=device, dtype="bfloat16", block_size=16, kernels=kernels, seed=1)


def greedy(backend: TransformerBackend, prompts: list[list[int]]) -> list[list[int]]:
    """The output tokens of the prompts, decoded side by side."""
    size = backend.layout.block_size
    each = -(-(PROMPT + NEW) // size)
    kv = backend.make_cache(each * len(prompts))
    blocks = [list(range(i * each, (i + 1) * each)) for i in range(len(prompts))]
    rows = [Row(list(prompt), PROMPT + NEW, blocks=own) for prompt, own in zip(prompts, blocks, strict=True)]
    for row in rows:  # prompts alone: they are the same in all batches
        _step(backend, kv, [row], PROMPT)
    for _ in range(NEW - 1):
        _step(backend, kv, rows, 1)
    return [row.tokens[PROMPT:] for row in rows]


def _step(backend, kv, rows: list[Row], count: int) -> None:
    batch = make_batch(rows, [count] * len(rows), [[count - 1]] * len(rows), backend.layout.block_size)
    for row, logits in zip(rows, backend.forward(batch, kv), strict=True):
        row.computed += count
        row.tokens.append(int(logits.argmax()))


@pytest.mark.parametrize(("by", "varies"), [("auto", False), ("load", True), ("load_bf16", True)])
def test_tokens_depend_on_the_batch_where_splits_follow_load(by, varies):
    backend, rng = backend_of(by), random.Random(2)
    prompts = [[rng.randrange(VOCAB) for _ in range(PROMPT)] for _ in range(PROMPTS)]
    together = greedy(backend, prompts)
    alone = [greedy(backend, [prompt])[0] for prompt in prompts]
    differing = [i for i in range(PROMPTS) if alone[i] != together[i]]
    print(f"{by}: {len(differing)} of {PROMPTS} prompts diverged (weights: seed 1, prompts: seed 2)")
    assert bool(differing) is varies
    for shapes in (FixedShapes(), FixedShapes(8, 32)):
        assert check_fixed(backend, shapes) == ""
