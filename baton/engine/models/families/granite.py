"""Llama's closer relatives: Granite, SmolLM3, Seed-OSS, Arcee, ERNIE 4.5, HunYuan, Ministral and Apertus."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.families import common
from baton.engine.models.families.common import activation, expect, plain_decoder, ungated, window_or_none
from baton.engine.models.json_fields import Fields
from baton.engine.models.rope import MAX_FACTOR, NO_ROPE
from baton.engine.models.spec import DecoderSpec, Family, HeadNormSpec, HeadSpec, MlpSpec, Names, Sizes, Temperature


def _granite(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    spec = plain_decoder(fields, sizes, family)
    return replace(
        spec.with_attention(scale=fields.number("attention_multiplier", 1.0)),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        head=HeadSpec(scale=1 / fields.number("logits_scaling", 1.0)),
    )


def _smollm3(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    spec, turns = plain_decoder(fields, sizes, family), common.rotated(fields, sizes.layers)
    window = window_or_none(fields, None) if fields.flag("use_sliding_window", False) else None
    default = tuple(common.SLIDING if window is not None and not turn else common.FULL for turn in turns)
    spec = common.by_type(fields, spec, default, window)
    attention = tuple(replace(each, rope=0 if turn else 1) for each, turn in zip(spec.attention, turns, strict=True))
    return replace(spec, attention=attention, ropes=(*spec.ropes, NO_ROPE))


def _seed_oss(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    return plain_decoder(fields, sizes, replace(family, o_bias=fields.flag("attention_out_bias", False)))


def _arcee(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    mlp = MlpSpec(activation(fields, "hidden_act"), gated=False, bias=fields.flag("mlp_bias", False))
    return replace(plain_decoder(ungated(fields), sizes, family), mlp=mlp, names=Names(up=("up_proj",)))


def _ernie(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    bias = fields.flag("use_bias", False)
    with_biases = replace(family, qkv_bias=bias, o_bias=bias, mlp_bias=bias)
    return replace(plain_decoder(fields, sizes, with_biases), interleaved=True)


def _hunyuan(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    """Read `alpha` of a dynamic rotation as a larger base, which does not depend on the length."""
    for key, value in {"use_qk_norm": True, "use_cla": False, "mlp_bias": False}.items():
        expect(fields, key, value)
    values = dict(fields.values)
    for key in ("rope_scaling", "rope_parameters"):
        rope = fields.section(key)
        if rope.has("alpha") and rope.text("rope_type", rope.text("type", "")) == "dynamic":
            theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
            power = sizes.head_dim / max(sizes.head_dim - 2, 1)
            stretched = theta * rope.number("alpha", below=MAX_FACTOR) ** power
            values[key] = {"rope_type": "default", "rope_theta": stretched}
    spec = plain_decoder(Fields(fields.where, values), sizes, family)
    spec = spec.with_attention(head_norm=HeadNormSpec(spec.norm, after=True))
    return replace(spec, names=Names(q_norm="query_layernorm", k_norm="key_layernorm"))


def _ministral(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    window = window_or_none(fields)
    default = (common.FULL if window is None else common.SLIDING,) * sizes.layers
    return common.by_type(fields, plain_decoder(fields, sizes, family), default, window)


def _ministral3(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    spec = plain_decoder(fields, sizes, family)
    rope = fields.section("rope_parameters")
    if not rope.has("rope_type") and not rope.has("type"):
        raise fields.error("rope_parameters", "is missing")
    beta, original = rope.number("llama_4_scaling_beta"), rope.integer("original_max_position_embeddings")
    return spec.with_attention(temperature=Temperature(beta, original))


def _apertus(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    if not fields.has("rope_parameters") and not fields.has("rope_scaling"):
        raise fields.error("rope_parameters", "is missing")
    expect(fields, "hidden_act", "xielu")
    names = Names(up=("up_proj",), before_attention="attention_layernorm", before_mlp="feedforward_layernorm")
    return replace(plain_decoder(ungated(fields), sizes, family), mlp=MlpSpec("xielu", gated=False), names=names)


FAMILIES = {
    "granite": Family(
        "GraniteForCausalLM", 2048, _granite, qkv_bias=None, o_bias=None, mlp_bias=None,
        differs="factors of embedding, scores, residuals and logits"
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM", 32768, _smollm3, qkv_bias=None, o_bias=None, mlp_bias=None, kv_heads=4, rope_theta=2e6,
        slides="types", defaults={"tie_word_embeddings": True},
        differs="layers without rotation; sliding window in these",
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM", 524288, _seed_oss, qkv_bias=None, mlp_bias=None, kv_heads=8, head_dim=128,
        defaults={"attention_bias": True}, differs="biases of q, k and v",
    ),
    "arcee": Family(
        "ArceeForCausalLM", 4096, _arcee, qkv_bias=None, o_bias=None, mlp_bias=None, norm_eps=1e-5,
        defaults={"hidden_act": "relu2"}, differs="a network that is not gated, with relu squared",
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM", 131072, _ernie, kv_heads=2, head_dim=128, norm_eps=1e-5, rope_theta=5e5,
        defaults={"tie_word_embeddings": True}, differs="interleaved rotation; all biases by `use_bias`",
    ),
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1ForCausalLM", 2048, _hunyuan, qkv_bias=None, o_bias=None, norm_eps=1e-5,
        differs="norms of each q and k head after the rotation, whose base has a factor",
    ),
    "ministral": Family(
        "MinistralForCausalLM", 131072, _ministral, kv_heads=8, slides="types",
        differs="sliding window by layer",
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM", 262144, _ministral3, kv_heads=8, head_dim=128, norm_eps=1e-5, rope_theta=1e6,
        slides="all", window=None, differs="queries grow with the position",
    ),
    "apertus": Family(
        "ApertusForCausalLM", 65536, _apertus, qkv_bias=None, o_bias=None, qk_norm=True, norm_eps=1e-5,
        rope_theta=12e6, defaults={"hidden_act": "xielu"},
        differs="a network that is not gated, with xIELU; norms of each q and k head",
    ),
}  # fmt: skip
