"""Helpers for the functions of families: the spec of a Llama-like decoder, and the checks of single keys."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from baton.engine.models.json_fields import Fields, shown
from baton.engine.models.recurrent.spec import RecurrentSpec
from baton.engine.models.rope import RopeConfig, parse_rope
from baton.engine.models.spec import (
    GATES,
    PLAIN,
    AttentionSpec,
    DecoderSpec,
    Family,
    HeadNormSpec,
    MlpSpec,
    NormSpec,
    Reach,
    Sizes,
)

DUAL_CHUNK, DUAL_CHUNK_LENGTH = "dual_chunk_attention_config", 262144  # its default length
SLIDING, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"


def plain_decoder(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    """Return the spec of a Llama-like decoder: norms before, a gated network, and the switches of the family."""
    attention_bias = fields.flag("attention_bias", False)
    norm = NormSpec(fields.number(family.eps_key, family.norm_eps))
    head_norm = HeadNormSpec(norm) if family.qk_norm else None
    qkv_bias = attention_bias if family.qkv_bias is None else family.qkv_bias
    o_bias = attention_bias if family.o_bias is None else family.o_bias
    mlp_bias = fields.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias
    act = activation(fields, family.act_key, GATES, family.defaults.get(family.act_key, "silu"))
    return DecoderSpec(
        attention=tuple(
            AttentionSpec(sizes.head_dim**-0.5, Reach(window), 0, qkv_bias, o_bias, head_norm)
            for window in windows(fields, sizes, family)
        ),
        mlp=MlpSpec(act, bias=mlp_bias),
        norm=norm,
        ropes=(rope_of(fields, sizes, family),),
    )


def rope_of(fields: Fields, sizes: Sizes, family: Family) -> RopeConfig:
    """Return the rotation of a model that has one for all layers. Dual chunk attention is plain up to a length."""
    rope = parse_rope(fields, sizes.max_positions, sizes.head_dim, family.rope_theta, partial=family.partial)
    if not fields.has(DUAL_CHUNK):
        return rope
    limit = fields.section(DUAL_CHUNK).integer("original_max_position_embeddings", DUAL_CHUNK_LENGTH)
    return replace(rope, limit=min(rope.limit, limit))


def activation(fields: Fields, key: str, allowed: dict[str, str] = PLAIN, default: str = "silu") -> str:
    """Return the kernels' name of an activation."""
    name = fields.text(key, default)
    if name not in allowed:
        raise fields.error(key, f"{name!r} is not supported (supported: {', '.join(allowed)})")
    return allowed[name]


def expect(fields: Fields, key: str, *allowed: Any) -> None:
    """Reject any other value of a key than these. An absent key is accepted."""
    if fields.has(key) and fields.values[key] not in allowed:
        values = " or ".join(map(repr, allowed))
        raise fields.error(key, f"must be {values} for this model, got {shown(fields.values[key])}")


def windows(fields: Fields, sizes: Sizes, family: Family) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, as in transformers. Llama never slides, Mistral in all layers or none.
    Qwen slides only with `use_sliding_window`: the family with experts in all layers, the others by layer type. A
    family of the kind `types` calls `windows_of` with its own layer types.
    """
    if family.slides == "types":
        return (None,) * sizes.layers
    flagged = family.slides in {"flagged", "layers"} and fields.flag("use_sliding_window", False)
    window = window_or_none(fields, family.window) if family.slides == "all" or flagged else None
    by_layer = family.slides == "layers"
    first = fields.integer("max_window_layers", 28, low=0) if by_layer else 0
    default = tuple(SLIDING if window is not None and i >= first else FULL for i in range(sizes.layers))
    types = layer_types(fields, default)
    if not by_layer and types != default:
        raise fields.error("layer_types", f"must be {default[0]} in all {fields.text('model_type')} layers")
    return windows_of(fields, types, window)


def by_type(
    fields: Fields, spec: DecoderSpec, default: tuple[str, ...], window: int | None, full_rope: int = 0
) -> DecoderSpec:
    """Return the spec with the window of each layer by its type. Layers without a window have their own rotation."""
    types = layer_types(fields, default)
    layers = zip(spec.attention, types, windows_of(fields, types, window), strict=True)
    attention = tuple(
        replace(each, reach=Reach(width), rope=0 if kind == SLIDING else full_rope) for each, kind, width in layers
    )
    return replace(spec, attention=attention)


def without_ropes(fields: Fields) -> Fields:
    """Return fields without the rotation, for families that read it by themselves."""
    kept = {key: value for key, value in fields.values.items() if key not in ("rope_scaling", "rope_parameters")}
    return Fields(fields.where, kept)


def ungated(fields: Fields) -> Fields:
    """Return fields without the activation, which `plain_decoder` would check as that of a gated network."""
    return Fields(fields.where, fields.values | {"hidden_act": "silu"})


def windows_of(fields: Fields, types: tuple[str, ...], window: int | None) -> tuple[int | None, ...]:
    """Return the sliding window of each layer by its type."""
    if window is None and SLIDING in types:
        raise fields.error("layer_types", "contains sliding_attention, but no sliding window is set")
    return tuple(window if kind == SLIDING else None for kind in types)


def layer_types(
    fields: Fields, default: tuple[str, ...], allowed: tuple[str, ...] = (FULL, SLIDING)
) -> tuple[str, ...]:
    """Return the type of each layer."""
    types = fields.texts("layer_types") or default
    if len(types) != len(default):
        raise fields.error("layer_types", f"must have {len(default)} entries, one per layer, got {len(types)}")
    unknown = sorted(set(types) - set(allowed))
    if unknown:
        raise fields.error("layer_types", f"{unknown[0]!r} is not supported")
    return types


def recurrent_layers(
    fields: Fields, types: tuple[str, ...], kind: str, spec: RecurrentSpec
) -> tuple[RecurrentSpec | None, ...]:
    """Return `spec` for each layer of this kind, and None for those with attention, of which there must be one."""
    if set(types) == {kind}:
        raise fields.error("layer_types", "must have attention in at least one layer")
    return tuple(spec if each == kind else None for each in types)


def time_steps(fields: Fields) -> tuple[float, float]:
    """Return the limits of the time steps of Mamba 2."""
    found = fields.values.get("time_step_limit") or [0.0, math.inf]
    # transformers writes infinity as an object.
    each = found if isinstance(found, list) else []
    limits = [math.inf if limit == {"__float__": "Infinity"} else limit for limit in each]
    numbers = all(type(limit) in (int, float) for limit in limits)
    if not numbers or len(limits) != 2 or not limits[0] <= limits[1]:  # also false for NaN
        raise fields.error("time_step_limit", f"must be two numbers, the lower one first, got {shown(found)}")
    return float(limits[0]), float(limits[1])


def every(layers: int, step: int, most: str = SLIDING, other: str = FULL) -> tuple[str, ...]:
    """Return `other` for each `step`-th layer and `most` for the others. Without a step, return `most` for all."""
    return tuple(other if step and (i + 1) % step == 0 else most for i in range(layers))


def rotated(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return whether each layer rotates, from `no_rope_layers`, in which 1 means a rotation."""
    step = fields.integer("no_rope_layer_interval", 4)
    flags = fields.integers("no_rope_layers") or tuple(int((i + 1) % step != 0) for i in range(layers))
    if len(flags) != layers or set(flags) - {0, 1}:
        raise fields.error("no_rope_layers", f"must have {layers} entries, each 0 or 1")
    return tuple(flag == 1 for flag in flags)


def window_or_none(fields: Fields, default: int | None = 4096) -> int | None:
    """Return `sliding_window`, or None if the key is null."""
    if "sliding_window" not in fields.values:
        return default
    return fields.integer("sliding_window") if fields.has("sliding_window") else None
