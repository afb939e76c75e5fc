"""Llama's closer relatives: Granite, SmolLM3, Seed-OSS, Arcee, ERNIE 4.5, HunYuan, Ministral and Apertus.

Granite 4 has Mamba 2 in most layers.
"""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.config_variants import ExpertsConfig, expert_count, experts_per_token
from baton.engine.models.families import common
from baton.engine.models.families.common import activation, expect, plain_decoder, ungated, window_or_none
from baton.engine.models.json_fields import Fields
from baton.engine.models.recurrent.spec import MambaSpec
from baton.engine.models.rope import MAX_FACTOR, MIN_FACTOR, NO_ROPE
from baton.engine.models.spec import DecoderSpec, Family, HeadNormSpec, HeadSpec, MlpSpec, Names, Sizes, Temperature


def _granite(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    spec = plain_decoder(fields, sizes, family)
    return replace(
        spec.with_attention(scale=fields.number("attention_multiplier", 1.0)),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        head=HeadSpec(scale=1 / fields.number("logits_scaling", 1.0)),
    )


def _granite_hybrid(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    """Return the spec of Granite 4. Without experts, the shared network is the only one."""
    expect(fields, "hidden_act", "silu", "swish")
    spec, rope = _granite(fields, sizes, family), fields.text("position_embedding_type", "nope")
    if rope not in ("rope", "nope"):
        raise fields.error("position_embedding_type", f"{rope!r} is not supported (supported: rope, nope)")
    names = common.layer_types(fields, (_MAMBA[0],) * sizes.layers, (common.FULL, "attention", *_MAMBA))
    types = tuple(_MAMBA[0] if name in _MAMBA else common.FULL for name in names)
    spec = replace(
        spec.with_attention(rope=0 if rope == "rope" else 1),
        ropes=(*spec.ropes, NO_ROPE),
        recurrent=common.recurrent_layers(fields, types, _MAMBA[0], _mamba(fields, sizes, spec)),
        inner=fields.integer("shared_intermediate_size", 1024),
        names=_HYBRID,
    )
    if fields.values.get("num_local_experts", 8) == 0:
        return replace(spec, names=replace(_HYBRID, mlp=_HYBRID.shared))
    count, inner = expert_count(fields, ("num_local_experts", "num_experts"), 8), fields.integer("intermediate_size")
    experts = ExpertsConfig(
        count, experts_per_token(fields, 2, count), inner, (True,) * sizes.layers, normalised=True,
        shared_inner=spec.inner or 0,
    )  # fmt: skip
    return replace(spec, experts=experts)


def _bamba(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    expect(fields, "hidden_act", "silu", "swish")  # the mixers' too
    attends = fields.integers("attn_layer_indices")
    types = tuple(common.FULL if layer in attends else _MAMBA[0] for layer in range(sizes.layers))
    spec = plain_decoder(fields, sizes, family)
    recurrent = common.recurrent_layers(fields, types, _MAMBA[0], _mamba(fields, sizes, spec))
    names = Names(norm="model.final_layernorm", mlp="feed_forward", before_mlp="pre_ff_layernorm", recurrent="mamba")
    return replace(spec, recurrent=recurrent, names=names)


_MAMBA = ("linear_attention", "mamba")
_HYBRID = Names(
    mlp="block_sparse_moe", router="router.layer", shared="shared_mlp", up=("input_linear",), down="output_linear",
    stacked=("input_linear.weight", "output_linear.weight"), recurrent="mamba",
)  # fmt: skip


def _mamba(fields: Fields, sizes: Sizes, spec: DecoderSpec) -> MambaSpec:
    heads, groups = fields.integer("mamba_n_heads", 128), fields.integer("mamba_n_groups", 1)
    inner = fields.integer("mamba_expand", 2) * sizes.hidden_size
    auto = fields.values.get("mamba_d_head", "auto") in ("auto", None)
    head_dim = inner // heads if auto else fields.integer("mamba_d_head")
    if heads * head_dim != inner or heads % groups:
        text = f"({heads}) heads of {head_dim} in {groups} groups do not divide the {inner} channels"
        raise fields.error("mamba_n_heads", text)
    states, width = fields.integer("mamba_d_state", 256), fields.integer("mamba_d_conv", 4, low=2, high=64)
    biases = fields.flag("mamba_conv_bias", True), fields.flag("mamba_proj_bias", False)
    limits = common.time_steps(fields)
    return MambaSpec(heads, head_dim, groups, states, width, spec.norm.eps, *biases, limits)


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
    beta = rope.number("llama_4_scaling_beta", above=-MIN_FACTOR)
    grows = Temperature(beta, rope.integer("original_max_position_embeddings"))
    return spec.with_attention(temperature=grows if beta else None)


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
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM", 2048, _granite_hybrid, qkv_bias=None, o_bias=None, slides="types", window=None,
        state="convolution tails and matrices", renamed={"layers_block_type": "layer_types"},
        differs="as Granite; Mamba 2 in most layers; mixture of experts with shared ones, or none"
    ),
    "bamba": Family(
        "BambaForCausalLM", 262144, _bamba, qkv_bias=None, o_bias=None, mlp_bias=None, kv_heads=8, norm_eps=1e-5,
        partial=0.5, slides="types", window=None, state="convolution tails and matrices",
        differs="Mamba 2 in most layers; half of dimensions rotates",
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
