"""Margins of a transformers model's routers, because rounding may decide a near tie either way.

Tests of sparse models use checkpoints and prompts without near ties. `assert_sure` measures them in the reference
model. If it fails, use another seed for the checkpoint.
"""

from collections.abc import Sequence
from typing import Any

import torch

SURE = 1e-5  # several times the float32 difference between two right implementations


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
