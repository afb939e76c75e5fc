"""Ranks with quantised weights compute with the levels and scales of one process. Ranks are threads."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from baton.engine.kernels.quantized import Quantize
from baton.engine.models.loading import load_model
from tests.unit.model.checkpoints import random_checkpoint
from tests.unit.model.harness import greedy, prompts
from tests.unit.model.test_quantised import FORMATS, compress, widen
from tests.unit.tp.support import on_threads, plan

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "head_dim": 16}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 259}


@pytest.mark.parametrize("size", [2, 4])  # four ranks share two KV heads
@pytest.mark.parametrize("form", ["int8", "int4", *FORMATS], ids=str)
def test_tokens_are_those_of_one_process(form: Any, size: int, tmp_path: Path, monkeypatch, seed: int) -> None:
    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    reference = random_checkpoint(tmp_path, "qwen2", **SIZES)
    if isinstance(form, tuple):
        compress(tmp_path, form[0], form[1] | {"type": "int"}, reference, head=True)
    quantize: Quantize = "none" if isinstance(form, tuple) else form
    whole = load_model(tmp_path, quantize=quantize, block_size=8)
    with closing(on_threads(replace(plan(tmp_path, size, str(tmp_path)), quantize=quantize), [])) as ranks:
        assert ranks.fingerprint == whole.fingerprint
        found = [greedy(backend, prompts((1, 9, 40)), 12, Random(seed)) for backend in (ranks, whole)]
    for own, other in zip(*found, strict=True):
        assert own.tokens == other.tokens
        for position, logits in own.logits.items():
            torch.testing.assert_close(logits, other.logits[position], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_compiled_kernels_of_ranks_are_as_near_as_those_of_one_process(name: Any, tmp_path: Path) -> None:
    """Each rank rounds its inputs of o and down with a scale of its own, so the bits are others."""
    reference = random_checkpoint(tmp_path, "qwen2", **SIZES)
    widen(reference, name)
    with closing(on_threads(replace(plan(tmp_path, 2, str(tmp_path)), quantize=name), [])) as ranks:
        for row in greedy(ranks, prompts((1, 9, 40)), 6, Random(3)):
            expected = reference(torch.tensor([row.tokens[:-1]])).logits[0]
            for position, logits in row.logits.items():
                assert (logits - expected[position]).std() < 0.25 * expected.std()
