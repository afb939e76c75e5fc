"""Mixture of experts against `transformers`: Mixtral and Qwen3-MoE, and the expert products by themselves."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from baton.engine.model.build import load_model
from baton.engine.model.layers import Step
from baton.engine.model.llama import MLP
from baton.engine.model.moe import SparseMLP
from tests.unit.model.checkpoints import VOCAB, random_checkpoint, reload
from tests.unit.model.harness import assert_bfloat16_as_good, assert_equals, greedy
from tests.unit.model.routing import assert_sure

NEW = 16
LENGTHS = (1, 2, 16, 17, 33, 64, 90, 150)
QWEN: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
MIXTRAL = {"num_local_experts": 6, "num_experts_per_tok": 2}

# The third entry is the seed of the weights: one without near ties in routing, see `assert_sure`.
VARIANTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "mixtral": ("mixtral", MIXTRAL, 0),
    "mixtral-window": ("mixtral", MIXTRAL | {"sliding_window": 24, "num_experts_per_tok": 1}, 0),
    "mixtral-all": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "head_dim": 16}, 0),
    "qwen3_moe": ("qwen3_moe", QWEN | {"norm_topk_prob": True}, 4),
    "qwen3_moe-plain": ("qwen3_moe", QWEN | {"attention_bias": True, "tie_word_embeddings": True}, 2),
    "qwen3_moe-step": ("qwen3_moe", QWEN | {"decoder_sparse_step": 2, "num_hidden_layers": 4}, 0),
    "qwen3_moe-mlp-only": ("qwen3_moe", QWEN | {"mlp_only_layers": [1], "num_hidden_layers": 3}, 1),
    "qwen3_moe-window": ("qwen3_moe", QWEN | {"use_sliding_window": True, "sliding_window": 30}, 3),
    "qwen3_moe-many": ("qwen3_moe", QWEN | {"num_experts": 48, "num_experts_per_tok": 2, "norm_topk_prob": True}, 1),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(variant: str, tmp_path, seed: int):
    family, settings, weights = VARIANTS[variant]
    oracle = random_checkpoint(tmp_path, family, seed=weights, **settings)
    backend = load_model(tmp_path)
    assert_sure(oracle, [row.tokens for row in greedy(backend, prompts(), NEW, random.Random(seed))])
    assert_equals(oracle, backend, prompts(), NEW, random.Random(seed))


@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe"])
def test_bfloat16_is_as_good_as_transformers(variant: str, tmp_path, seed: int):
    family, settings, weights = VARIANTS[variant]
    random_checkpoint(tmp_path, family, seed=weights, dtype=torch.bfloat16, **settings)
    oracle, exact = reload(tmp_path, family, torch.bfloat16), reload(tmp_path, family, torch.float32)
    assert_bfloat16_as_good(oracle, exact, load_model(tmp_path), prompts(), NEW, random.Random(seed))


def sparse(layer: Any) -> SparseMLP:
    assert isinstance(layer.feed_forward, SparseMLP)
    return layer.feed_forward


def test_which_layers_have_experts(tmp_path):
    """Rounding cannot tell: a dense layer has other tensors, and they are all taken."""
    for variant, expected in (("qwen3_moe-step", [0, 1, 0, 1]), ("qwen3_moe-mlp-only", [1, 0, 1])):
        family, settings, weights = VARIANTS[variant]
        random_checkpoint(tmp_path / variant, family, seed=weights, **settings)
        layers = load_model(tmp_path / variant).model.layers
        assert [isinstance(layer.feed_forward, SparseMLP) for layer in layers] == [bool(e) for e in expected]
        assert all(isinstance(layer.feed_forward, SparseMLP | MLP) for layer in layers)


@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("layout", ["mlp.experts.gate_up_proj", "experts.0."])
def test_both_layouts_of_a_checkpoint(variant: str, layout: str, tmp_path):
    """The hub's, one tensor per expert, and the fused one of transformers 5: the same logits, bit for bit."""
    family, settings, weights = VARIANTS[variant]
    oracle = random_checkpoint(tmp_path / "hub", family, seed=weights, **settings)
    oracle.save_pretrained(tmp_path / "fused", save_original_format=False)
    names = {folder: set(load_file(tmp_path / folder / "model.safetensors")) for folder in ("hub", "fused")}
    assert any(layout in name for name in names["fused" if "gate_up" in layout else "hub"])
    assert names["hub"] != names["fused"]
    hub, fused = (
        greedy(load_model(tmp_path / folder), prompts()[3:5], 4, random.Random(1)) for folder in ("hub", "fused")
    )
    for one, other in zip(hub, fused, strict=True):
        assert all(torch.equal(one.logits[i], other.logits[i]) for i in one.logits)


ROWS = 9


def choices() -> dict[str, torch.Tensor]:
    """Experts of each of 9 rows, out of 8."""
    generator = torch.Generator().manual_seed(3)
    every = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(ROWS)])
    return {
        "spread": every,
        "all to the same": torch.tensor([[5, 1, 7]]).expand(ROWS, 3),
        "one row alone with an expert": torch.cat((torch.tensor([[0, 6, 3]]), torch.tensor([[1, 2, 4]] * (ROWS - 1)))),
        "one row": torch.tensor([[7, 0, 2]]),
        "one expert each": every[:, :1],
    }


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> tuple[Any, Any]:
    """Ours and those of transformers, with the same weights."""
    folder = tmp_path_factory.mktemp("experts")
    oracle = random_checkpoint(folder, "qwen3_moe", **QWEN)
    return load_model(folder).model, oracle.model.layers[0].mlp.experts


@pytest.mark.parametrize("case", choices())
def test_products_equal_transformers(case: str, experts: tuple[Any, Any], seed: int):
    model, oracle = experts
    chosen = choices()[case]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(chosen), model.config.hidden_size, generator=generator)
    weights = torch.rand(chosen.shape, generator=generator)
    step = Step(None, None, {}, model.scratch)  # type: ignore[arg-type]  # neither positions nor a cache
    mine = sparse(model.layers[0]).experts(x, weights, chosen, step)
    torch.testing.assert_close(mine, oracle(x, chosen, weights), atol=1e-5, rtol=1e-5)


def test_a_row_is_what_it_is_in_other_company(experts: tuple[Any, Any], seed: int):
    """As long as its experts have as many rows, it gets the same bits, whatever the others hold."""
    model, _ = experts
    generator = torch.Generator().manual_seed(seed)
    chosen, step = choices()["all to the same"], Step(None, None, {}, model.scratch)  # type: ignore[arg-type]
    weights = torch.rand(chosen.shape, generator=generator)
    results = []
    for _ in range(2):
        x = torch.randn(ROWS, model.config.hidden_size, generator=generator)
        x[4] = torch.arange(model.config.hidden_size) / 20 - 1
        results.append(sparse(model.layers[0]).experts(x, weights, chosen, step)[4].clone())
    assert torch.equal(*results)
