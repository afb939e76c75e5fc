"""Llama, Mistral and Mixtral."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.config_variants import mixtral_experts
from baton.engine.models.families.common import plain_decoder
from baton.engine.models.json_fields import Fields
from baton.engine.models.spec import DecoderSpec, Family, Sizes


def _mixtral(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    return replace(plain_decoder(fields, sizes, family), experts=mixtral_experts(fields, sizes.layers))


FAMILIES = {
    "llama": Family("LlamaForCausalLM", 2048, qkv_bias=None, o_bias=None, mlp_bias=None),
    "mistral": Family(
        "MistralForCausalLM", 131072, kv_heads=8, slides="all", differs="sliding window in all layers or none"
    ),
    "mixtral": Family(
        "MixtralForCausalLM", 131072, _mixtral, kv_heads=8, norm_eps=1e-5, rope_theta=1e6, slides="all", window=None,
        differs="mixture of experts in all layers; sliding window in all layers or none",
    ),
}  # fmt: skip
