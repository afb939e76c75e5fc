"""Ranks with quantised weights compute with the levels and scales of one process. Ranks are threads."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from baton.engine.kernels.quantized import SCHEMES, Quantize, quantize
from baton.engine.model_backend import ModelBackend
from baton.engine.models.loading import load_model
from baton.gguf.folder import gguf_folder
from tests.support.compiled_kernels import share_kernels
from tests.unit.model.checkpoints import NATIVE, RECURRENT, edit_config, random_checkpoint
from tests.unit.model.harness import greedy, prompts
from tests.unit.model.test_quantised import FORMATS, compress, widen
from tests.unit.tp.support import on_threads, plan

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "head_dim": 16}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 259}


def check_same(ranks: ModelBackend, whole: ModelBackend, seed: int, atol: float = 1e-4) -> None:
    assert ranks.fingerprint == whole.fingerprint
    found = [greedy(backend, prompts((1, 9, 40)), 12, Random(seed)) for backend in (ranks, whole)]
    for own, other in zip(*found, strict=True):
        assert own.tokens == other.tokens
        for position, logits in own.logits.items():
            torch.testing.assert_close(logits, other.logits[position], rtol=1e-4, atol=atol)


@pytest.mark.sample(2)
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
        check_same(ranks, whole, seed)


@pytest.mark.sample(2)
@pytest.mark.parametrize("form", ["int8", FORMATS[0]], ids=str)
@pytest.mark.parametrize("name", ["granite-hybrid", "qwen3_5", "lfm2", "gemma4"])
def test_tokens_of_other_layers_are_those_of_one_process(
    form: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process differs by up to 3e-4 from itself in other chunks, so two best logits could change places."""
    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    reference = (RECURRENT | NATIVE)[name].write(tmp_path, vocab_size=259)
    if isinstance(form, tuple):
        monkeypatch.setattr("tests.unit.model.test_quantised.parameter_of", lambda *_: Mock())
        compress(tmp_path, form[0], form[1] | {"type": "int"}, reference)
    quantize: Quantize = "none" if isinstance(form, tuple) else form
    whole = load_model(tmp_path, quantize=quantize, block_size=8)
    with closing(on_threads(replace(plan(tmp_path, 2, str(tmp_path)), quantize=quantize), [])) as ranks:
        check_same(ranks, whole, seed=2, atol=1e-3)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_layer_with_groups_that_ranks_would_cut_is_widened(kind: str, tmp_path: Path, monkeypatch, seed: int) -> None:
    """Each rank has 80 inputs of down_proj, which are two and a half groups of GGUF."""
    from tests.support.gguf_files import Export

    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    random_checkpoint(tmp_path, "qwen2", **SIZES | {"intermediate_size": 160})
    monkeypatch.setenv("BATON_HOME", str(share_kernels(tmp_path / "home")))
    monkeypatch.setattr("baton.gguf.folder._tokenizer", lambda header: "{}")
    Export(tmp_path, tmp_path / "m.gguf", "qwen2", kind)
    folder = gguf_folder(tmp_path / "m.gguf")
    edit_config(folder, dtype="float32")
    whole = load_model(folder, block_size=8)
    with closing(on_threads(plan(tmp_path, 2, str(folder)), [])) as ranks:
        check_same(ranks, whole, seed)


def test_columns_that_cut_a_group_are_rejected() -> None:
    whole = quantize(torch.ones(2, 128), SCHEMES["int4"])
    assert torch.equal(whole.columns(range(32, 96)).widened(), whole.widened()[:, 32:96])
    for own in (range(16, 80), range(32, 80)):
        with pytest.raises(ValueError, match=rf"inputs {own.start} to 80 are no whole groups of 32"):
            whole.columns(own)


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
