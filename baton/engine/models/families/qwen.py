"""Qwen2, Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.config_variants import qwen3_experts
from baton.engine.models.families.common import plain_decoder
from baton.engine.models.json_fields import Fields
from baton.engine.models.spec import DecoderSpec, Family, Sizes


def _moe(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    return replace(plain_decoder(fields, sizes, family), experts=qwen3_experts(fields, sizes.layers))


_QWEN3 = Family(
    "Qwen3ForCausalLM", 32768, qkv_bias=None, o_bias=None, qk_norm=True, head_dim=128, slides="layers",
    differs="norms of each q and k head; sliding window by layer",
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
}  # fmt: skip
