"""KV in int8 in whole models: logits near those of exact KV, equal tokens after a handoff, and refusals."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from baton.engine.determinism.checks import check_fixed
from baton.engine.models.loading import load_model
from baton.errors import ConfigError
from tests.support.engines import engine_of, hand_over, key_of, numbers, run, spec_of
from tests.unit.model.checkpoints import DENSE, LATENT, random_checkpoint, thinking_checkpoint
from tests.unit.model.harness import greedy, prompts
from tests.unit.model.test_fixed_forwards import SHAPES, differing
from tests.unit.tp.support import on_threads, plan

LEVELS = pytest.mark.parametrize("level", ["none", "native"])


@LEVELS
@pytest.mark.parametrize("family", ["llama", "mistral", "llama-wide"])
def test_logits_are_near_those_of_exact_kv(family: str, level: str, tmp_path: Path, monkeypatch) -> None:
    """The models are random, so errors do not cancel."""
    monkeypatch.setenv("BATON_CPU_LEVEL", level)
    made = {**DENSE, "llama-wide": DENSE["llama"]._replace(settings={"head_dim": 64})}[family]
    reference, backend = made.write(tmp_path), load_model(tmp_path, kv_dtype="int8")
    for row in greedy(backend, prompts((1, 9, 40)), 6, Random(3)):
        expected = reference(torch.tensor([row.tokens[:-1]])).logits[0]
        errors = [(logits - expected[at]).std() / expected.std() for at, logits in row.logits.items()]
        assert 1e-5 < max(errors) < 0.1


def test_fingerprints_and_sizes_differ(tmp_path: Path) -> None:
    random_checkpoint(tmp_path, "llama")
    found = [load_model(tmp_path, dtype=d, kv_dtype=kv) for d in ("float32", "bfloat16") for kv in ("auto", "int8")]
    assert len({backend.fingerprint for backend in found}) == 4
    heads, dim = found[0].layout.kv_heads, found[0].layout.head_dim
    assert [backend.layout.layer_token_bytes // (2 * heads) for backend in found] == [
        4 * dim,
        dim + 2,
        2 * dim,
        dim + 2,
    ]


@pytest.mark.slow
@LEVELS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_depend_on_the_position_alone(dtype: str, level: str, tmp_path: Path, monkeypatch, seed: int) -> None:
    monkeypatch.setenv("BATON_CPU_LEVEL", level)
    random_checkpoint(tmp_path, "llama", head_dim=64)
    backend = load_model(tmp_path, dtype=dtype, kv_dtype="int8")
    assert differing(backend, seed) == []
    assert check_fixed(backend, SHAPES) == ""


@LEVELS
@pytest.mark.parametrize("thinks", [False, True])
def test_a_handoff_changes_no_token(thinks: bool, level: str, tmp_path: Path, monkeypatch, seed: int) -> None:
    monkeypatch.setenv("BATON_CPU_LEVEL", level)
    (thinking_checkpoint if thinks else random_checkpoint)(tmp_path, "llama")
    prompt = spec_of(numbers(Random(seed), 70, 190), max_tokens=20, deterministic=True)
    models = [load_model(tmp_path, dtype="bfloat16", kv_dtype="int8", block_size=size) for size in (8, 16)]
    alone = run(engine_of(models[0], 40, shapes=SHAPES), [prompt])
    giver, taker = (engine_of(model, 40, shapes=SHAPES, max_batched_tokens=25) for model in models)
    moved = hand_over(giver, taker, prompt)
    assert moved.ids(key_of()) == alone.ids(key_of(0))
    assert moved.thoughts[key_of()] == alone.thoughts[key_of(0)]


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)], ids=str)
def test_ranks_get_their_heads(sizes: tuple[int, int], tmp_path: Path, seed: int) -> None:
    random_checkpoint(tmp_path, "llama", vocab_size=259)
    prompt = spec_of(numbers(Random(seed), 60, 190), max_tokens=8)
    expected = run(engine_of(load_model(tmp_path, kv_dtype="int8"), 24), [prompt]).ids(key_of(0))
    layout = replace(plan(tmp_path, 2, str(tmp_path)), kv_dtype="int8")
    with closing(on_threads(layout, [])) as ranks:
        one = load_model(tmp_path, kv_dtype="int8", block_size=8)
        assert ranks.fingerprint == one.fingerprint
        giver, taker = (engine_of(ranks if size == 2 else one, 24) for size in sizes)
        assert hand_over(giver, taker, prompt).ids(key_of()) == expected


def test_what_cannot_be_is_rejected_by_name(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "m", "llama")
    with pytest.raises(ConfigError, match=r"model.kv_dtype: int8 is not supported on cuda:0, only on CPUs; use auto"):
        load_model(tmp_path / "m", device="cuda:0", kv_dtype="int8")
    LATENT["v2"].write(tmp_path / "latent")
    with pytest.raises(ConfigError, match=r"model.kv_dtype: int8 is not supported for latent attention; use auto"):
        load_model(tmp_path / "latent", kv_dtype="int8")
