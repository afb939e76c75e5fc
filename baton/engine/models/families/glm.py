"""GLM 4, GLM 4.5 with experts, and MiniMax M2."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.config_variants import ExpertsConfig, deepseek_v3_experts, expert_count, experts_per_token
from baton.engine.models.families.common import expect, plain_decoder
from baton.engine.models.json_fields import Fields
from baton.engine.models.spec import DecoderSpec, Family, HeadNormSpec, Names, Sizes


def _glm4(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    names = Names(
        up=("gate_up_proj",),
        after_attention="post_self_attn_layernorm",
        before_mlp="post_attention_layernorm",
        after_mlp="post_mlp_layernorm",
    )
    return replace(plain_decoder(fields, sizes, family), interleaved=True, names=names)


def _glm4_moe(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    normed = replace(family, qk_norm=fields.flag("use_qk_norm", False))
    return replace(
        plain_decoder(fields, sizes, normed), experts=deepseek_v3_experts(fields, sizes.layers, default_count=128)
    )


def _minimax_m2(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    """`rotary_dim` is the former spelling of `partial_rotary_factor`."""
    for key, value in {"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid"}.items():
        expect(fields, key, value)
    expect(fields, "shared_intermediate_size", 0)
    if set(fields.integers("attn_type_list")) - {1}:
        raise fields.error("attn_type_list", "must be 1 for all layers")
    if fields.has("rotary_dim"):
        share = fields.integer("rotary_dim") / sizes.head_dim
        fields = Fields(fields.where, {"partial_rotary_factor": share, **fields.values})
    spec = plain_decoder(fields, sizes, family)
    norms = HeadNormSpec(spec.norm, over="width")
    count = expert_count(fields, ("num_local_experts", "num_experts"), 256)
    experts = ExpertsConfig(
        count, experts_per_token(fields, 8, count), fields.integer("intermediate_size"), (True,) * sizes.layers,
        normalised=True, sigmoid=True, corrected=True,
    )  # fmt: skip
    names = Names(correction="e_score_correction_bias")
    return replace(spec.with_attention(head_norm=norms), experts=experts, names=names)


FAMILIES = {
    "glm4": Family(
        "Glm4ForCausalLM", 131072, _glm4, qkv_bias=None, kv_heads=2, head_dim=128, norm_eps=1.5625e-07, partial=0.5,
        defaults={"attention_bias": True},
        differs="norms before and after each block; half of dimensions rotates, interleaved; fused gate and up",
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM", 131072, _glm4_moe, qkv_bias=None, kv_heads=8, norm_eps=1e-5, partial=0.5, ahead=1,
        defaults={
            "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
        },
        differs="mixture of experts as DeepSeek-V3; norms of each q and k head; half of dimensions rotates",
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM", 196608, _minimax_m2, kv_heads=8, head_dim=128, rope_theta=5e6, partial=1.0,
        differs="mixture of experts routed by sigmoid with a bias; norms of all q and all k heads together",
    ),
}  # fmt: skip
