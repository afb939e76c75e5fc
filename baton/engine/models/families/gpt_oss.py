"""gpt-oss: attention sinks, and experts with biases and limits."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.config_variants import ExpertsConfig, expert_count, experts_per_token
from baton.engine.models.families.common import by_type, every, expect, plain_decoder, window_or_none
from baton.engine.models.json_fields import Fields
from baton.engine.models.spec import Clamp, DecoderSpec, Family, MlpSpec, Names, Sizes


def _gpt_oss(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    if not fields.has("rope_parameters") and not fields.has("rope_scaling"):
        raise fields.error("rope_scaling", "is missing")
    expect(fields, "hidden_act", "silu")
    spec = plain_decoder(fields, sizes, family)
    spec = by_type(fields, spec, every(sizes.layers, 2), window_or_none(fields, 128))
    count = expert_count(fields, ("num_local_experts", "num_experts"), 128)
    experts = ExpertsConfig(
        count, experts_per_token(fields, 4, count), fields.integer("intermediate_size"), (True,) * sizes.layers,
        normalised=True, biased=True, transposed=True, paired=True,
    )  # fmt: skip
    clamp = Clamp(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0))
    return replace(
        spec.with_attention(sinks=True),
        mlp=MlpSpec("silu", clamp=clamp),
        experts=experts,
        names=Names(router="router"),
    )


FAMILIES = {
    "gpt_oss": Family(
        "GptOssForCausalLM", 131072, _gpt_oss, qkv_bias=None, o_bias=None, kv_heads=8, head_dim=64, norm_eps=1e-5,
        rope_theta=150000.0, slides="types", defaults={"attention_bias": True},
        differs="attention sinks; mixture of experts with biases and limits; sliding window by layer",
    ),
}  # fmt: skip
