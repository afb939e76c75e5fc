"""Each kind of model against `transformers` on the same random weights: the same greedy tokens, and the same logits.

Rounding may decide a near tie in routing either way, so models with experts use weights and prompts without near ties.
`assert_sure` measures them in the reference model. If it fails, choose another seed for the variant.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.models.loading import load_model
from tests.unit.model.checkpoints import reload
from tests.unit.model.harness import Row, greedy, prompts
from tests.unit.model.variants import DENSE, LATENT, SPARSE

VARIANTS = DENSE | SPARSE | LATENT
MANY = (1, 2, 3, 15, 16, 17, 31, 33, 48, 64, 65, 90, 100, 127, 128, 150, 199, 256, 270, 300)
FEW = (1, 2, 16, 17, 33, 64, 90, 150)  # of models that compute slowly; their seeds are chosen for these lengths
SURE = 1e-5  # several times the float32 difference between two right implementations


def variants(names: Iterable[str]) -> Any:
    cases = [pytest.param(name, marks=() if name in DENSE else pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("name", cases)


def answered(name: str, folder: Path, seed: int) -> Iterator[tuple[list[int], Row]]:
    """Decode prompts greedily with the model in `folder`. Return each prompt with its row."""
    lengths, new = (MANY, 32) if name in DENSE else (FEW, 16)
    some = prompts(lengths)
    return zip(some, greedy(load_model(folder), some, new, random.Random(seed)), strict=True)


def routers(oracle: Any) -> list[Any]:
    return [module for module in oracle.modules() if type(module).__name__.lower().endswith("topkrouter")]


def assert_sure(oracle: Any, sequences: Sequence[Sequence[int]]) -> None:
    """Check that no router has a near tie at any of these tokens, and that most experts are chosen at least once."""
    # For each router and call: its logits [N, experts] and its chosen experts [N, k].
    seen: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {router: [] for router in routers(oracle)}
    for router, calls in seen.items():
        router.register_forward_hook(lambda _, __, found, calls=calls: calls.append((found[0].float(), found[2])))
    for tokens in sequences:
        oracle(torch.tensor([tokens]))
    for router, calls in seen.items():
        assert min(float(margins(router, logits).min()) for logits, _ in calls) > SURE
        assert len(torch.cat([chosen.flatten() for _, chosen in calls]).unique()) > 0.7 * router.weight.shape[0]


def margins(router: Any, logits: torch.Tensor) -> torch.Tensor:
    """Return the margin between the last chosen and the first other, of groups and of experts: [N]."""
    biased = hasattr(router, "e_score_correction_bias")
    ranks = logits.sigmoid() + router.e_score_correction_bias if biased else logits.softmax(-1)
    sure = torch.full((len(ranks),), float("inf"))
    grouped = biased or getattr(router, "topk_method", "") == "group_limited_greedy"
    if grouped and router.topk_group < router.num_group:
        of_expert = ranks.view(len(ranks), router.num_group, -1)
        of_group = of_expert.topk(2)[0].sum(-1) if biased else of_expert.amax(-1)
        sure = torch.minimum(sure, _gap(of_group, router.topk_group))
        worst = of_group.topk(router.topk_group)[0][:, -1:]
        ranks = of_expert.masked_fill((of_group < worst)[..., None], float("-inf")).flatten(1)
    return torch.minimum(sure, _gap(ranks, router.top_k))


def _gap(ranks: torch.Tensor, chosen: int) -> torch.Tensor:
    if chosen == ranks.shape[1]:
        return torch.full((len(ranks),), float("inf"))
    best = ranks.topk(chosen + 1)[0]
    return best[:, -2] - best[:, -1]


@variants(VARIANTS)
def test_equals_transformers(name: str, tmp_path: Path, seed: int):
    """Checks tokens by induction: each is the argmax of transformers' logits after the tokens before it."""
    oracle = VARIANTS[name].write(tmp_path)
    answers = list(answered(name, tmp_path, seed))
    if routers(oracle):
        assert_sure(oracle, [row.tokens for _, row in answers])
    for prompt, row in answers:
        assert row.tokens[: len(prompt)] == prompt
        logits = oracle(torch.tensor([row.tokens])).logits[0]
        assert row.tokens[len(prompt) :] == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        seen = sorted(row.logits)
        assert set(seen) >= set(range(len(prompt) - 1, len(row.tokens) - 1))
        torch.testing.assert_close(torch.stack([row.logits[i] for i in seen]), logits[seen], atol=1e-4, rtol=0)


@variants(["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "v2-lite", "v2", "v3", "v3-dense"])
def test_bfloat16_is_as_good_as_transformers(name: str, tmp_path: Path, seed: int):
    """Our bfloat16 logits are no farther from the float32 ones than those of transformers, up to chance.

    The few rows with another routing would decide a sum, so models with experts compare the median row.
    """
    VARIANTS[name].write(tmp_path, dtype=torch.bfloat16)
    family = VARIANTS[name].family
    oracle, exact = (reload(tmp_path, family, dtype) for dtype in (torch.bfloat16, torch.float32))
    same, ours, others = (list[torch.Tensor]() for _ in range(3))
    for _, row in answered(name, tmp_path, seed):
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
