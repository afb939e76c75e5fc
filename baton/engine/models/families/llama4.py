"""The text models of Llama 4."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.config_variants import ExpertsConfig, expert_count, experts_per_token
from baton.engine.models.families.common import CHUNKED, FULL, layer_types, plain_decoder, rotated
from baton.engine.models.json_fields import Fields
from baton.engine.models.rope import NO_ROPE
from baton.engine.models.spec import DecoderSpec, Family, HeadNormSpec, Names, Reach, Sizes, Temperature


def _llama4(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    """Layers that rotate attend within chunks. The norm of heads has no weight, so it may come before the rotation."""
    spec, turns = plain_decoder(fields, sizes, family), rotated(fields, sizes.layers)
    types = layer_types(fields, tuple(CHUNKED if turn else FULL for turn in turns), (FULL, CHUNKED))
    chunk = fields.integer("attention_chunk_size", 8192)
    norms = HeadNormSpec(spec.norm, over="bare") if fields.flag("use_qk_norm", True) else None
    warms = Temperature(fields.number("attn_scale", 0.1), fields.number("floor_scale", 8192), 1)
    key = "attn_temperature_tuning"  # a flag, or in older files a number, of which 0 means false
    is_number = type(fields.values.get(key)) is int
    warms_up = fields.integer(key, low=0) > 0 if is_number else fields.flag(key, True)
    attention = tuple(
        replace(
            each,
            reach=Reach(chunk=chunk if kind == CHUNKED and chunk < sizes.max_positions else None),
            head_norm=norms if turn else None,
            rope=0 if turn else 1,
            temperature=None if turn or not warms_up else warms,
        )
        for each, turn, kind in zip(spec.attention, turns, types, strict=True)
    )
    return replace(
        spec,
        attention=attention,
        ropes=(*spec.ropes, NO_ROPE),
        interleaved=True,
        experts=_experts(fields, sizes.layers),
        names=Names(mlp="feed_forward", router="router", shared="feed_forward.shared_expert"),
    )


def _experts(fields: Fields, layers: int) -> ExpertsConfig:
    step = fields.integer("interleave_moe_layer_step", 1)
    listed = fields.integers("moe_layers") if fields.has("moe_layers") else range(step - 1, layers, step)
    count, inner = expert_count(fields, ("num_local_experts", "num_experts"), 16), fields.integer("intermediate_size")
    return ExpertsConfig(
        count, experts_per_token(fields, 1, count), inner, tuple(layer in listed for layer in range(layers)),
        normalised=False, shared_inner=inner, sigmoid=True, transposed=True, scaled_inputs=True,
    )  # fmt: skip


FAMILIES = {
    "llama4_text": Family(
        "Llama4ForCausalLM", 131072, _llama4, qkv_bias=None, o_bias=None, kv_heads=8, head_dim=128, norm_eps=1e-5,
        rope_theta=5e5, slides="types", inner_key="intermediate_size_mlp",
        defaults={"intermediate_size_mlp": 16384},
        differs="attention within chunks, else no rotation; mixture of experts whose inputs are weighted",
    ),
}  # fmt: skip
