"""DeepSeek-V2, V3 and V3.2, and Kimi K2, which is V3 under another name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from baton.engine.models.config_variants import ExpertsConfig, deepseek_v2_experts, deepseek_v3_experts, parse_latent
from baton.engine.models.families.common import plain_decoder
from baton.engine.models.json_fields import Fields
from baton.engine.models.spec import DecoderSpec, Family, Read, Sizes


def _latent(experts: Callable[[Fields, int], ExpertsConfig]) -> Read:
    """Return the function of a family with these experts. Queries have `query_dim` numbers, of which some rotate."""

    def read(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
        fields = _without_kinds(fields)
        latent = parse_latent(fields, fields.text("model_type"), sizes.heads)
        assert latent is not None
        spec = plain_decoder(fields, replace(sizes, head_dim=latent.rope_dim), family)
        scale = latent.query_dim**-0.5 * spec.ropes[0].softmax_factor
        return replace(spec.with_attention(scale=scale), latent=latent, experts=experts(fields, sizes.layers))

    return read


def _without_kinds(fields: Fields) -> Fields:
    """Return fields without the types of layers if all are those of V3.2, which the indexer describes."""
    if set(fields.texts("layer_types")) != {"indexed_attention"}:
        return fields
    return Fields(fields.where, {key: value for key, value in fields.values.items() if key != "layer_types"})


FAMILIES = {
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM", 2048, _latent(deepseek_v2_experts), qkv_bias=None, o_bias=None, mlp_bias=None,
        differs="latent attention; mixture of experts with shared ones",
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM", 4096, _latent(deepseek_v3_experts), qkv_bias=None, o_bias=None, ahead=1,
        also=("kimi_k2",),
        differs="latent attention; mixture of experts with shared ones, routed by sigmoid with a bias",
    ),
    "deepseek_v32": Family(
        "DeepseekV32ForCausalLM", 163840, _latent(deepseek_v3_experts), qkv_bias=None, o_bias=None, ahead=1,
        differs="as DeepSeek-V3; an indexer selects the positions that a token attends to",
    ),
}  # fmt: skip
