"""The part of config.json that describes a mixture of experts, for each family that has one.

Keys, defaults and quirks are those of `transformers`; what it ignores, but other code for the same checkpoints obeys,
is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.engine.model.fields import Fields

MAX_EXPERTS = 2**14  # far above any model; bounds the work that a hostile config can ask for


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """How layers with experts route and compute. Layer i has experts where `sparse[i]`, else a dense network.

    A token goes to `per_token` of `count` experts, each `inner` wide. With `groups` above 1, only the experts of its
    `best_groups` groups are eligible. The weights of the chosen are divided by their sum (`normalised`), then times
    `scaling`. `shared_inner` is the width of the network that all tokens pass as well; 0: there is none.
    """

    count: int
    per_token: int
    inner: int
    sparse: tuple[bool, ...]
    normalised: bool
    scaling: float = 1.0
    shared_inner: int = 0
    groups: int = 1
    best_groups: int = 1
    sigmoid: bool = False  # scores by sigmoid and ranked with a learnt bias; else by softmax
    float32_router: bool = False  # else the router computes in the model's dtype


def parse_experts(fields: Fields, family: str, layers: int) -> ExpertsConfig | None:
    """The checked section; None for a family without experts. Raises CheckpointError naming the key."""
    parse = _PARSERS.get(family)
    return parse(fields, layers) if parse else None


def _mixtral(fields: Fields, layers: int) -> ExpertsConfig:
    count = _count(fields, ("num_local_experts", "num_experts"), 8)
    inner = fields.integer("intermediate_size")
    return ExpertsConfig(count, _per_token(fields, 2, count), inner, (True,) * layers, normalised=True)


def _qwen3(fields: Fields, layers: int) -> ExpertsConfig:
    count = _count(fields, ("num_experts", "num_local_experts"), 128)
    step, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    sparse = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    inner, normalised = fields.integer("moe_intermediate_size", 768), fields.flag("norm_topk_prob", False)
    return ExpertsConfig(count, _per_token(fields, 8, count), inner, sparse, normalised)


def _deepseek_v2(fields: Fields, layers: int) -> ExpertsConfig:
    _expect(fields, "scoring_func", "softmax")
    method = fields.text("topk_method", "greedy")
    if method not in {"greedy", "group_limited_greedy"}:
        raise fields.error("topk_method", f"{method!r} is not supported (supported: greedy, group_limited_greedy)")
    if fields.flag("norm_topk_prob", False):  # transformers ignores it, the authors' own code does not
        raise fields.error("norm_topk_prob", "true is not supported for deepseek_v2")
    count = _count(fields, ("n_routed_experts", "num_experts"), 64)
    inner, shared = fields.integer("moe_intermediate_size", 1407), fields.integer("n_shared_experts", 2)
    groups, best = (1, 1) if method == "greedy" else _groups(fields, None, None, count)
    return ExpertsConfig(
        count,
        _per_token(fields, None, count // groups * best),
        inner,
        _after_dense(fields, 0, layers),
        normalised=False,
        scaling=fields.number("routed_scaling_factor", 1.0),
        shared_inner=shared * inner,
        groups=groups,
        best_groups=best,
        float32_router=True,
    )


def _deepseek_v3(fields: Fields, layers: int) -> ExpertsConfig:
    _expect(fields, "scoring_func", "sigmoid")
    _expect(fields, "topk_method", "noaux_tc")
    count = _count(fields, ("n_routed_experts", "num_local_experts"), 256)
    inner, shared = fields.integer("moe_intermediate_size", 2048), fields.integer("n_shared_experts", 1)
    groups, best = _groups(fields, 8, 4, count)
    return ExpertsConfig(
        count,
        _per_token(fields, 8, count // groups * best),
        inner,
        _after_dense(fields, 3, layers),
        normalised=fields.flag("norm_topk_prob", True),
        scaling=fields.number("routed_scaling_factor", 2.5),
        shared_inner=shared * inner,
        groups=groups,
        best_groups=best,
        sigmoid=True,
        float32_router=True,
    )


_PARSERS: dict[str, Callable[[Fields, int], ExpertsConfig]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}


def _count(fields: Fields, keys: tuple[str, str], default: int) -> int:
    """The number of experts, by the hub's key or the one that transformers 5 writes."""
    found = [fields.integer(key, high=MAX_EXPERTS) for key in keys if fields.has(key)]
    if len(set(found)) > 1:
        raise fields.error(keys[0], f"({found[0]}) contradicts {keys[1]} ({found[1]})")
    return found[0] if found else default


def _per_token(fields: Fields, default: int | None, eligible: int) -> int:
    per_token = fields.integer("num_experts_per_tok", default)
    if per_token > eligible:
        raise fields.error("num_experts_per_tok", f"({per_token}) must be at most the {eligible} eligible experts")
    return per_token


def _groups(fields: Fields, groups: int | None, best: int | None, count: int) -> tuple[int, int]:
    groups, best = fields.integer("n_group", groups), fields.integer("topk_group", best)
    if count % groups:
        raise fields.error("n_group", f"({groups}) must divide the number of experts ({count})")
    if best > groups:
        raise fields.error("topk_group", f"({best}) must be at most n_group ({groups})")
    return groups, best


def _after_dense(fields: Fields, dense: int, layers: int) -> tuple[bool, ...]:
    _expect(fields, "moe_layer_freq", 1)
    first = fields.integer("first_k_dense_replace", dense, low=0)
    return tuple(layer >= first for layer in range(layers))


def _expect(fields: Fields, key: str, value: Any) -> None:
    if fields.has(key) and fields.values[key] != value:
        raise fields.error(key, f"must be {value!r} here, got {fields.values[key]!r:.60}")
