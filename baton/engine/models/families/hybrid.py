"""LFM2 and LFM2-MoE, of which most layers are short convolutions, and Nemotron-H with Mamba 2."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.config_variants import ExpertsConfig, expert_count, experts_per_token
from baton.engine.models.families import common
from baton.engine.models.families.common import FULL, activation, expect, layer_types, plain_decoder, recurrent_layers
from baton.engine.models.json_fields import Fields
from baton.engine.models.recurrent.spec import MambaSpec, ShortConvSpec
from baton.engine.models.rope import NO_ROPE
from baton.engine.models.spec import DecoderSpec, Family, HeadNormSpec, MlpSpec, Names, Sizes

CONV = "conv"
_NAMES = Names(
    norm="model.embedding_norm", o="out_proj", q_norm="q_layernorm", k_norm="k_layernorm", mlp="feed_forward",
    up=("w1", "w3"), down="w2", correction="expert_bias", before_attention="operator_norm", before_mlp="ffn_norm",
    recurrent="conv",
)  # fmt: skip


def _lfm2(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    expect(fields, "hidden_act", "silu", "swish")  # transformers reads no other
    spec = plain_decoder(fields, sizes, family)
    attends = fields.integers("full_attn_idxs") if fields.has("full_attn_idxs") else range(sizes.layers)
    default = tuple(FULL if layer in attends else CONV for layer in range(sizes.layers))
    types = layer_types(fields, default, (FULL, CONV))
    width, bias = fields.integer("conv_L_cache", 3, low=2, high=64), fields.flag("conv_bias", False)
    conv = ShortConvSpec(sizes.hidden_size, width, bias)
    return replace(
        spec.with_attention(head_norm=HeadNormSpec(spec.norm)),
        recurrent=recurrent_layers(fields, types, CONV, conv),
        names=_NAMES,
    )


def _dense(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    inner = fields.integer("intermediate_size")
    if fields.flag("block_auto_adjust_ff_dim", True):
        inner = int(2 * inner / 3)
        if fields.values.get("block_ffn_dim_multiplier", 1.0) is not None:
            multiple = fields.integer("block_multiple_of", 256)
            inner = -(-int(fields.number("block_ffn_dim_multiplier", 1.0) * inner) // multiple) * multiple
    return replace(_lfm2(fields, sizes, family), inner=inner)


def _moe(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    count = expert_count(fields, ("num_experts", "num_local_experts"), 32)
    dense, inner = fields.integer("num_dense_layers", 2, low=0), fields.integer("moe_intermediate_size", 1792)
    sparse = tuple(layer >= dense for layer in range(sizes.layers))
    experts = ExpertsConfig(
        count, experts_per_token(fields, 4, count), inner, sparse, sigmoid=True, least=1e-6,
        normalised=fields.flag("norm_topk_prob", True), scaling=fields.number("routed_scaling_factor", 1.0),
        corrected=fields.flag("use_expert_bias", True),
    )  # fmt: skip
    return replace(_lfm2(fields, sizes, family), experts=experts)


MAMBA, NETWORK, EXPERTS = "linear_attention", "mlp", "moe"
_LETTERS = {"M": MAMBA, "*": FULL, "-": NETWORK, "E": EXPERTS}
_OLD = {"mamba": MAMBA, "attention": FULL}


def _nemotron_h(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    """Return the spec of Nemotron-H, of which each layer is Mamba 2, attention without rotation, or a network."""
    expect(fields, "mamba_hidden_act", "silu")
    types = _types(fields, sizes.layers)
    mlp = MlpSpec(activation(fields, "mlp_hidden_act"), gated=False, bias=fields.flag("mlp_bias", False))
    spec = plain_decoder(fields, sizes, family)
    kinds = tuple(MAMBA if kind == MAMBA else FULL for kind in types)
    mamba = _mamba(fields, spec.norm.eps)
    return replace(
        spec.with_attention(rope=1),
        ropes=(*spec.ropes, NO_ROPE),
        mlp=mlp,
        recurrent=recurrent_layers(fields, kinds, MAMBA, mamba),
        single=tuple("network" if kind in (NETWORK, EXPERTS) else "mixer" for kind in types),
        experts=_nemotron_experts(fields, types) if EXPERTS in types else None,
        names=_NEMOTRON,
    )


def _nemotron_experts(fields: Fields, types: tuple[str, ...]) -> ExpertsConfig:
    expect(fields, "moe_latent_size", None)
    count, inner = expert_count(fields, ("n_routed_experts", "num_local_experts"), 8), 7688
    groups, best = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    if count % groups or best > groups:
        raise fields.error("n_group", f"({groups}) must divide {count} experts, and be at least topk_group ({best})")
    return ExpertsConfig(
        count, experts_per_token(fields, 2, count // groups * best), fields.integer("moe_intermediate_size", inner),
        tuple(kind == EXPERTS for kind in types), normalised=fields.flag("norm_topk_prob", True),
        scaling=fields.number("routed_scaling_factor", 1.0), groups=groups, best_groups=best,
        shared_inner=fields.integer("moe_shared_expert_intermediate_size", inner),
        sigmoid=True, corrected=True, float32_router=True,
    )  # fmt: skip


_NEMOTRON = Names(
    embed="backbone.embeddings", layers="backbone.layers", norm="backbone.norm_f", attention="mixer", mlp="mixer",
    shared="mixer.shared_experts", up=("up_proj",), before_attention="norm", before_mlp="", recurrent="mixer",
)  # fmt: skip


def _types(fields: Fields, layers: int) -> tuple[str, ...]:
    """Return the kind of each layer, of which one must be attention."""
    key = "layers_block_type" if fields.has("layers_block_type") else "hybrid_override_pattern"
    found = fields.texts(key) if key == "layers_block_type" else fields.text(key)
    types = tuple(_LETTERS.get(kind) or _OLD.get(kind, kind) for kind in found)
    if unknown := set(types) - {MAMBA, FULL, NETWORK, EXPERTS}:
        raise fields.error(key, f"{min(unknown)!r} is not supported")
    if FULL not in types or len(types) != layers:
        raise fields.error(key, "must have attention in at least one layer")
    return types


def _mamba(fields: Fields, eps: float) -> MambaSpec:
    heads, groups = fields.integer("mamba_num_heads", 128), fields.integer("n_groups", 8)
    if heads % groups:
        raise fields.error("mamba_num_heads", f"({heads}) must be divisible by n_groups ({groups})")
    head_dim, states = fields.integer("mamba_head_dim", 64), fields.integer("ssm_state_size", 128)
    width = fields.integer("conv_kernel", 4, low=2, high=64)
    biases = fields.flag("use_conv_bias", True), fields.flag("use_bias", False)
    limits = common.time_steps(fields)  # `time_step_min` bounds initial values only
    keys = ("mamba_num_heads", "n_groups")
    return MambaSpec(heads, head_dim, groups, states, width, eps, *biases, limits, keys=keys)


_LFM2 = Family(
    "Lfm2ForCausalLM", 128000, _dense, kv_heads=8, norm_eps=1e-5, rope_theta=1e6, eps_key="norm_eps",
    slides="types", window=None, state="convolution tails",
    defaults={"tie_word_embeddings": True}, renamed={"tie_embedding": "tie_word_embeddings"},
    differs="short convolutions in most layers; norms of each q and k head",
)  # fmt: skip
FAMILIES = {
    "lfm2": replace(_LFM2, renamed={**_LFM2.renamed, "block_ff_dim": "intermediate_size"}),
    "lfm2_moe": replace(
        _LFM2, architecture="Lfm2MoeForCausalLM", read=_moe,
        differs="as LFM2; mixture of experts routed by sigmoid with a bias",
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM", 4096, _nemotron_h, kv_heads=8, head_dim=128, norm_eps=1e-5,
        eps_key="layer_norm_epsilon", slides="types", window=None, unread=("mtp.",),
        listed=("layers_block_type", "hybrid_override_pattern"), state="convolution tails and matrices", defaults={
            "mlp_hidden_act": "relu2"
        }, renamed={
            "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
            "mamba_dt_limit": "time_step_limit",
        },
        differs="each layer is Mamba 2, attention without rotation, or a network or mixture of experts without gates",
    ),
}  # fmt: skip
