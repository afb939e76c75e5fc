"""Mixture of experts against `transformers`: Mixtral and Qwen3-MoE, and the expert products alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from baton.engine.models.llama import MLP, Step
from baton.engine.models.loading import load_model
from baton.engine.models.moe import SparseMLP
from tests.unit.model.checkpoints import random_checkpoint
from tests.unit.model.harness import Variant, check_bfloat16, check_logits, greedy, prompts

pytestmark = pytest.mark.slow

NEW = 16
LENGTHS = (1, 2, 16, 17, 33, 64, 90, 150)
QWEN: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
MIXTRAL = {"num_local_experts": 6, "num_experts_per_tok": 2}

VARIANTS: dict[str, Variant] = {
    "mixtral": Variant("mixtral", MIXTRAL, 0),
    "mixtral-window": Variant("mixtral", MIXTRAL | {"sliding_window": 24, "num_experts_per_tok": 1}, 0),
    "mixtral-all": Variant("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "head_dim": 16}, 0),
    "qwen3_moe": Variant("qwen3_moe", QWEN | {"norm_topk_prob": True}, 4),
    "qwen3_moe-plain": Variant("qwen3_moe", QWEN | {"attention_bias": True, "tie_word_embeddings": True}, 2),
    "qwen3_moe-step": Variant("qwen3_moe", QWEN | {"decoder_sparse_step": 2, "num_hidden_layers": 4}, 0),
    "qwen3_moe-mlp-only": Variant("qwen3_moe", QWEN | {"mlp_only_layers": [1], "num_hidden_layers": 3}, 1),
    "qwen3_moe-window": Variant("qwen3_moe", QWEN | {"use_sliding_window": True, "sliding_window": 30}, 3),
    "qwen3_moe-many": Variant(
        "qwen3_moe", QWEN | {"num_experts": 48, "num_experts_per_tok": 2, "norm_topk_prob": True}, 1
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(variant: str, tmp_path, seed: int):
    check_logits(VARIANTS[variant], tmp_path, LENGTHS, NEW, seed)


@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe"])
def test_bfloat16_is_as_good_as_transformers(variant: str, tmp_path, seed: int):
    check_bfloat16(VARIANTS[variant], tmp_path, LENGTHS, NEW, seed)


def sparse(layer: Any) -> SparseMLP:
    assert isinstance(layer.feed_forward, SparseMLP)
    return layer.feed_forward


def test_which_layers_have_experts(tmp_path):
    """Checks the types, because rounding hides a wrong choice. A dense layer has other tensors, and all are used."""
    for variant, expected in (("qwen3_moe-step", [MLP, SparseMLP] * 2), ("qwen3_moe-mlp-only", [SparseMLP, MLP] * 2)):
        VARIANTS[variant].write(tmp_path / variant)
        layers = load_model(tmp_path / variant).model.layers
        assert [type(layer.feed_forward) for layer in layers] == expected[: len(layers)]


@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe"])
def test_both_layouts_of_a_checkpoint(variant: str, tmp_path):
    """The hub's layout, one tensor per expert, and the fused one of transformers 5 give identical logits."""
    oracle = VARIANTS[variant].write(tmp_path / "hub")
    oracle.save_pretrained(tmp_path / "fused", save_original_format=False)
    found = []
    for layout, part in (("hub", "experts.0."), ("fused", "mlp.experts.gate_up_proj")):
        assert any(part in name for name in load_file(tmp_path / layout / "model.safetensors"))
        found.append(greedy(load_model(tmp_path / layout), prompts((17, 33)), 4, random.Random(1)))
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(one.logits[i], other.logits[i]) for i in one.logits)


ROWS = 9


def choices() -> dict[str, torch.Tensor]:
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
    folder = tmp_path_factory.mktemp("experts")
    oracle = random_checkpoint(folder, "qwen3_moe", **QWEN)
    return load_model(folder).model, oracle.model.layers[0].mlp.experts


def products(model: Any, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    step = Step(None, None, {}, model.scratch)  # type: ignore[arg-type]  # neither positions nor a cache
    return sparse(model.layers[0]).experts(x, weights, chosen, step).clone()


@pytest.mark.parametrize("case", choices())
def test_products_equal_transformers(case: str, experts: tuple[Any, Any], seed: int):
    model, oracle = experts
    chosen, generator = choices()[case], torch.Generator().manual_seed(seed)
    x = torch.randn(len(chosen), model.config.hidden_size, generator=generator)
    weights = torch.rand(chosen.shape, generator=generator)
    torch.testing.assert_close(products(model, x, weights, chosen), oracle(x, chosen, weights), atol=1e-5, rtol=1e-5)


def test_a_row_is_what_it_is_in_other_company(experts: tuple[Any, Any], seed: int):
    """A row gets the same bits whatever the other rows are, if its experts have equally many rows."""
    model, _ = experts
    chosen, generator = choices()["all to the same"], torch.Generator().manual_seed(seed)
    weights, results = torch.rand(chosen.shape, generator=generator), []
    for _ in range(2):
        x = torch.randn(ROWS, model.config.hidden_size, generator=generator)
        x[4] = torch.arange(model.config.hidden_size) / 20 - 1
        results.append(products(model, x, weights, chosen)[4])
    assert torch.equal(*results)
