"""The products of experts against `transformers`, and both layouts of their weights."""

import random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from baton.engine.models.llama import Step
from baton.engine.models.loading import load_model
from baton.engine.models.moe import SparseMLP
from tests.unit.model.checkpoints import random_checkpoint
from tests.unit.model.harness import greedy, prompts
from tests.unit.model.variants import QWEN, SPARSE

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe"])
def test_both_layouts_of_a_checkpoint(variant: str, tmp_path):
    """The hub's layout, one tensor per expert, and the fused one of transformers 5 give identical logits."""
    oracle = SPARSE[variant].write(tmp_path / "hub")
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
    layer = model.layers[0].feed_forward
    assert isinstance(layer, SparseMLP)
    return layer.experts(x, weights, chosen, step).clone()


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
