"""Settings of rotary position embeddings and of their scalings: linear, llama3, yarn, and up to the original length
dynamic, longrope. Defaults are those of `transformers` (modeling_rope_utils). This module loads without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from baton.engine.models.json_fields import MAX_INT, Fields, shown

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# Far beyond useful values. They protect float32 from overflow by an untrusted config.
MIN_FACTOR, MAX_FACTOR, MAX_THETA = 1e-6, 1e6, 1e30


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One kind of rotation and its parameters. `limit` is the largest number of positions for which it is valid."""

    kind: str
    theta: float
    head_dim: int
    limit: int
    factor: float = 1.0
    original: int = 0  # positions of pretraining
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # yarn, longrope: multiplies cos and sin
    softmax_factor: float = 1.0  # multiplies scores, in latent attention only
    share: float = 1.0  # proportional: of pairs that rotate
    factors: tuple[float, ...] = ()  # longrope: a divisor of each frequency


NO_ROPE = RopeConfig("none", 10000.0, 2, MAX_INT)


def parse_rope(
    fields: Fields,
    max_positions: int,
    head_dim: int,
    default_theta: float = 10000.0,
    *,
    partial: float | None = None,
    kind_of_layers: str = "",
    proportional: bool = False,
) -> RopeConfig:
    """Parse `rope_parameters` (transformers 5), or `rope_scaling` and `rope_theta` (before). If `partial` is None, all
    dimensions must be rotated; else it is the default share. `kind_of_layers` selects a part of `rope_parameters`.
    `proportional` allows this type, whose keys must all be in that part. Raises CheckpointError with the key.
    """
    rope = fields.section("rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters")
    if kind_of_layers and rope.values and not fields.values.get("rope_scaling"):
        if not rope.has(kind_of_layers):
            raise rope.error(kind_of_layers, "is missing")
        rope = rope.section(kind_of_layers)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise rope.error("rope_type", "for each layer type is not supported")
    kinds = (*ROPE_TYPES, "proportional") if proportional else ROPE_TYPES
    if kind not in kinds:
        raise rope.error("rope_type", f"{kind!r} is not supported (supported: {', '.join(kinds)})")
    if kind == "proportional":
        return _proportional(rope, max_positions, head_dim, default_theta)
    head_dim = _rotated(rope, fields, head_dim, partial)
    # Above 1, because yarn divides by its logarithm and no trained model has less.
    theta = fields.number("rope_theta", default_theta, above=1.0, below=MAX_THETA)
    theta = rope.number("rope_theta", theta, above=1.0, below=MAX_THETA)
    plain = RopeConfig(kind, theta, head_dim, max_positions)
    if kind == "default":
        return plain
    config = _parse_scaled(rope, fields, plain)
    mscale_all_dim = _factor(rope, "mscale_all_dim", 0.0, above=-MIN_FACTOR)
    return replace(config, softmax_factor=_mscale(config.factor, mscale_all_dim) ** 2) if mscale_all_dim else config


def _proportional(rope: Fields, max_positions: int, head_dim: int, default_theta: float) -> RopeConfig:
    theta = rope.number("rope_theta", default_theta, above=1.0, below=MAX_THETA)
    share = rope.number("partial_rotary_factor", 1.0, below=1 + MIN_FACTOR)
    factor = _factor(rope, "factor", 1.0)
    return RopeConfig("proportional", theta, head_dim, max_positions, factor, share=share)


def _rotated(rope: Fields, fields: Fields, head_dim: int, partial: float | None) -> int:
    """Return the number of rotated dimensions."""
    owner = rope if rope.has("partial_rotary_factor") else fields
    share = owner.number("partial_rotary_factor", 1.0 if partial is None else partial, below=MAX_FACTOR)
    if partial is None and share != 1.0:
        raise owner.error("partial_rotary_factor", "other than 1 is not supported")
    rotated = int(head_dim * share)
    if not 2 <= rotated <= head_dim or rotated % 2:
        raise owner.error("partial_rotary_factor", f"({share:g}) must rotate an even number of {head_dim} dimensions")
    return rotated


def _parse_scaled(rope: Fields, fields: Fields, plain: RopeConfig) -> RopeConfig:
    if plain.kind == "dynamic":
        # No effect within the original length. Beyond it, a longer sequence would require cached keys to rotate again.
        return replace(plain, factor=_factor(rope, "factor"), original=plain.limit)
    if plain.kind == "linear":
        factor = _factor(rope, "factor")
        return replace(plain, factor=factor, limit=max(plain.limit, int(plain.limit * factor)))
    # The top-level key has priority over the nested one, as in transformers.
    original = rope.integer("original_max_position_embeddings", plain.limit)
    original = fields.integer("original_max_position_embeddings", original)
    if plain.kind == "longrope":
        return _parse_longrope(rope, replace(plain, original=original, limit=min(original, plain.limit)), plain.limit)
    parse = _parse_llama3 if plain.kind == "llama3" else _parse_yarn
    return parse(rope, replace(plain, original=original))


def _factor(rope: Fields, key: str, default: float | None = None, above: float = MIN_FACTOR) -> float:
    return rope.number(key, default, above=above, below=MAX_FACTOR)


def _parse_llama3(rope: Fields, plain: RopeConfig) -> RopeConfig:
    low, high = (_factor(rope, f"{end}_freq_factor") for end in ("low", "high"))
    if low > high:
        raise rope.error("high_freq_factor", f"must be at least low_freq_factor ({low:g}), got {high:g}")
    return replace(plain, factor=_factor(rope, "factor"), low_freq_factor=low, high_freq_factor=high)


def _parse_yarn(rope: Fields, plain: RopeConfig) -> RopeConfig:
    if (share := rope.values.get("extrapolation_factor")) not in (None, 1):
        raise rope.error("extrapolation_factor", f"must be 1, got {shown(share)}")
    factor = _factor(rope, "factor", plain.limit / plain.original)
    return replace(
        plain,
        limit=max(plain.limit, int(plain.original * factor)),
        factor=factor,
        beta_fast=_factor(rope, "beta_fast", 32.0),
        beta_slow=_factor(rope, "beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def _parse_longrope(rope: Fields, plain: RopeConfig, longest: int) -> RopeConfig:
    """Use the short factors. Others hold beyond the original length, so that cached keys would have to rotate again."""
    found = rope.values.get("short_factor")
    factors = tuple(found) if isinstance(found, list) else ()
    if len(factors) != plain.head_dim // 2 or not all(_is_factor(each) for each in factors):
        raise rope.error("short_factor", f"must be a list of {plain.head_dim // 2} numbers above 0")
    ratio = longest / plain.original
    ratio = _factor(rope, "factor", ratio) if rope.has("factor") else ratio
    usual = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(max(plain.original, 2)))
    scale = _factor(rope, "attention_factor", usual)
    return replace(plain, factor=ratio, factors=tuple(map(float, factors)), attention_factor=scale)


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and MIN_FACTOR < value < MAX_FACTOR


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """Return the given factor, or the paper's formula. `mscale` and `mscale_all_dim` apply only together. `attn_factor`
    multiplies the formula, as in vLLM and SGLang; transformers does not read it.
    """
    if rope.has("attention_factor"):
        return _factor(rope, "attention_factor")
    mscale, mscale_all_dim = (_factor(rope, key, 0.0, above=-MIN_FACTOR) for key in ("mscale", "mscale_all_dim"))
    both = mscale and mscale_all_dim
    usual = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim) if both else _mscale(factor, 1.0)
    return usual * _factor(rope, "attn_factor", 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
