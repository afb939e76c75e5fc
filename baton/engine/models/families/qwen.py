"""Qwen2, Qwen3 and Qwen3-MoE, and Qwen3-Next and Qwen3.5 with gated delta nets in most layers."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.config_variants import qwen3_experts
from baton.engine.models.families.common import FULL, every, expect, layer_types, plain_decoder, recurrent_layers
from baton.engine.models.json_fields import Fields
from baton.engine.models.recurrent.spec import GatedDeltaSpec
from baton.engine.models.spec import DecoderSpec, Family, HeadNormSpec, Names, Sizes

LINEAR = "linear_attention"


def _moe(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    return replace(plain_decoder(fields, sizes, family), experts=qwen3_experts(fields, sizes.layers))


def _delta(fields: Fields, sizes: Sizes, family: Family, *, grouped: bool = False) -> DecoderSpec:
    """Return the spec of a decoder with gated delta nets, and with gated attention in the other layers."""
    expect(fields, "hidden_act", "silu")
    spec, step = plain_decoder(fields, sizes, family), fields.integer("full_attention_interval", 4)
    types = layer_types(fields, every(sizes.layers, step, LINEAR), (FULL, LINEAR))
    key_heads, value_heads = fields.integer("linear_num_key_heads", 16), fields.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        text = f"({value_heads}) must be divisible by linear_num_key_heads ({key_heads})"
        raise fields.error("linear_num_value_heads", text)
    dims = fields.integer("linear_key_head_dim", 128), fields.integer("linear_value_head_dim", 128)
    width = fields.integer("linear_conv_kernel_dim", 4, low=2, high=64)
    delta = GatedDeltaSpec(key_heads, value_heads, *dims, width, spec.norm.eps, grouped)
    norm = replace(spec.norm, plus_one=True)
    return replace(
        spec.with_attention(head_norm=HeadNormSpec(norm), gated=True),
        norm=norm,
        recurrent=recurrent_layers(fields, types, LINEAR, delta),
        names=Names(recurrent="linear_attn", shared="mlp.shared_expert"),
    )


def _with_experts(fields: Fields, sizes: Sizes, spec: DecoderSpec) -> DecoderSpec:
    shared = fields.integer("shared_expert_intermediate_size", 512, low=0)
    return replace(spec, experts=replace(qwen3_experts(fields, sizes.layers), shared_inner=shared, shared_gate=True))


def _next(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    return _with_experts(fields, sizes, _delta(fields, sizes, family, grouped=True))


def _qwen35_moe(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    return _with_experts(fields, sizes, _delta(fields, sizes, family))


_QWEN3 = Family(
    "Qwen3ForCausalLM", 32768, qkv_bias=None, o_bias=None, qk_norm=True, head_dim=128, slides="layers",
    differs="norms of each q and k head; sliding window by layer",
)  # fmt: skip
_EXPERTS = {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True}
_DELTA = Family(
    "Qwen3_5ForCausalLM", 32768, _delta, qkv_bias=None, o_bias=None, kv_heads=4, head_dim=256, partial=0.25,
    slides="types", window=None, unread=("mtp.",), state="convolution tails and matrices",
    differs="as Qwen3-Next without experts",
)  # fmt: skip
FAMILIES = {
    "qwen2": Family(
        "Qwen2ForCausalLM", 32768, qkv_bias=True, slides="layers",
        differs="biases of q, k and v; sliding window by layer",
    ),
    "qwen3": _QWEN3,
    "qwen3_moe": replace(
        _QWEN3, architecture="Qwen3MoeForCausalLM", read=_moe, kv_heads=4, head_dim=None, slides="flagged",
        differs="mixture of experts by layer; norms of each q and k head; sliding window in all layers or none",
    ),
    "qwen3_next": replace(
        _DELTA, architecture="Qwen3NextForCausalLM", read=_next, kv_heads=2, defaults=_EXPERTS,
        differs="gated delta nets in most layers, else gated attention; a quarter of dimensions rotates; mixture of "
        "experts with a gated shared one",
    ),
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": replace(
        _DELTA, architecture="Qwen3_5MoeForCausalLM", read=_qwen35_moe, kv_heads=2, inner_key="moe_intermediate_size",
        defaults=_EXPERTS | {
            "num_experts": 256, "num_experts_per_tok": 8,
        },
        differs="as Qwen3-Next",
    ),
}  # fmt: skip
