"""Gemma 2, and the text models of Gemma 3 and 4."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.config_variants import MAX_DIM
from baton.engine.models.families.common import (
    FULL,
    SLIDING,
    by_type,
    every,
    expect,
    layer_types,
    plain_decoder,
    window_or_none,
    windows_of,
    without_ropes,
)
from baton.engine.models.json_fields import Fields
from baton.engine.models.rope import RopeConfig, parse_rope
from baton.engine.models.spec import (
    AttentionSpec,
    DecoderSpec,
    Family,
    HeadNormSpec,
    HeadSpec,
    LayerInputs,
    Names,
    NormSpec,
    Reach,
    Sizes,
)

CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
NAMES = Names(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def _gemma(fields: Fields, sizes: Sizes, spec: DecoderSpec, pattern: int) -> DecoderSpec:
    """Return the spec without norms of heads. Every `pattern`-th layer has no window and the last rotation."""
    expect(fields, "use_bidirectional_attention", False)
    spec = by_type(fields, spec, every(sizes.layers, pattern), window_or_none(fields), len(spec.ropes) - 1)
    caps = [fields.number(key) if fields.has(key) else None for key in CAPS]
    return replace(
        spec.with_attention(scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5, soft_cap=caps[0]),
        norm=replace(spec.norm, plus_one=True),
        head=HeadSpec(soft_cap=caps[1]),
        names=NAMES,
        embedding_scale=sizes.hidden_size**0.5,
    )


def _gemma2(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    return _gemma(fields, sizes, plain_decoder(fields, sizes, family), 2)


def _gemma3(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    """Layers with a window have their own rotation. `rope_scaling` is for the others only."""
    if fields.has(CAPS[0]):  # transformers ignores it
        raise fields.error(CAPS[0], f"must be null for {fields.text('model_type')}")
    local = {"rope_theta": fields.number("rope_local_base_freq", 10000.0)}
    local |= fields.section("rope_parameters").section("sliding_attention").values
    size = (sizes.max_positions, sizes.head_dim)
    sliding = parse_rope(Fields(fields.where, {"rope_parameters": local}), *size)
    full = parse_rope(fields, *size, family.rope_theta, kind_of_layers="full_attention")
    spec = replace(plain_decoder(without_ropes(fields), sizes, family), ropes=(sliding, full))
    spec = _gemma(fields, sizes, spec, fields.integer("sliding_window_pattern", 6))
    return spec.with_attention(head_norm=HeadNormSpec(spec.norm))


def _gemma4(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    """Layers without a window have their own heads and rotation. There are inputs of each layer."""
    expect(fields, "enable_moe_block", False)
    if fields.has("use_bidirectional_attention"):
        expect(fields, "use_bidirectional_attention", "vision")  # about images only
    types = (*layer_types(fields, every(sizes.layers, 6))[:-1], FULL)  # the last one, as in transformers
    spec = plain_decoder(without_ropes(fields), sizes, family)
    attention = _gemma4_layers(fields, sizes, types, spec.attention[0])
    shared = [each.reads is not None and fields.flag("use_double_wide_mlp", False) for each in attention]
    inner, cap = fields.integer("intermediate_size"), CAPS[1]
    width = fields.integer("hidden_size_per_layer_input", 256, low=0)
    return replace(
        spec,
        attention=attention,
        ropes=_gemma4_ropes(fields, sizes, types, attention[-1].head_dim or sizes.head_dim),
        names=NAMES,
        embedding_scale=sizes.hidden_size**0.5,
        head=HeadSpec(soft_cap=fields.number(cap) if fields.has(cap) else None),
        inputs=LayerInputs(width, _gemma4_inputs(fields) if width else 1),
        wide=tuple(2 * inner if double else inner for double in shared),
    )


def _gemma4_layers(
    fields: Fields, sizes: Sizes, types: tuple[str, ...], plain: AttentionSpec
) -> tuple[AttentionSpec, ...]:
    """Return the attention of each layer. The last `num_kv_shared_layers` read the KV of earlier ones of their type."""
    same = fields.flag("attention_k_eq_v", False)
    head_dim, kv_heads, key = _full_heads(fields, sizes, types, same=same)
    shared = fields.integer("num_kv_shared_layers", 0, low=0, high=sizes.layers)
    plain = replace(plain, scale=1.0, head_norm=HeadNormSpec(NormSpec(fields.number("rms_norm_eps", 1e-6))))
    full = replace(plain, rope=1, head_dim=head_dim, kv_heads=kv_heads, kv_heads_key=key, keys_are_values=same)
    kinds = {SLIDING: plain, FULL: full}
    writers = {kind: layer for layer, kind in enumerate(types[: sizes.layers - shared])}
    if shared and (unread := set(types) - set(writers)):
        raise fields.error("num_kv_shared_layers", f"({shared}) leaves no {min(unread)} layer with keys and values")
    reads = [None if layer < sizes.layers - shared else writers[kind] for layer, kind in enumerate(types)]
    layers = zip(types, reads, windows_of(fields, types, window_or_none(fields, 512)), strict=True)
    return tuple(
        replace(kinds[kind], reads=layer, reach=Reach(window), value_norm=layer is None)
        for kind, layer, window in layers
    )


def _full_heads(fields: Fields, sizes: Sizes, types: tuple[str, ...], *, same: bool) -> tuple[int, int, str]:
    """Return the size of KV heads in full_attention layers, their number and its key. `per_layer_config` (transformers
    5) has only those that differ from the other layers, and takes precedence. The number is used before only if V is K
    (`same`).
    """
    layers = [str(layer) for layer, kind in enumerate(types) if kind == FULL]
    entries = fields.section("per_layer_config")
    owner, dim, count, usual = entries.section(layers[0]), "head_dim", "num_key_value_heads", sizes.head_dim
    if entries.values and entries.values != dict.fromkeys(layers, owner.values):
        wanted = f"must have the same entry for each full_attention layer ({', '.join(layers)}), and no other"
        raise fields.error("per_layer_config", wanted)
    if unknown := sorted(owner.values.keys() - {dim, count}):
        raise owner.error(unknown[0], f"is not supported (supported: {dim}, {count})")
    if not fields.has("per_layer_config"):
        owner, dim, count, usual = fields, "global_head_dim", "num_global_key_value_heads", 512
    head_dim = owner.integer(dim, usual, high=MAX_DIM)
    if head_dim % 2:
        raise owner.error(dim, f"must be even for rotary embeddings, got {head_dim}")
    kv_heads = owner.integer(count, sizes.kv_heads) if same or owner is not fields else sizes.kv_heads
    if sizes.heads % kv_heads:
        raise owner.error(count, f"({kv_heads}) must divide num_attention_heads ({sizes.heads})")
    return head_dim, kv_heads, count if owner is fields else f"{count} in per_layer_config"


def _gemma4_inputs(fields: Fields) -> int:
    """Return the number of tokens that have inputs of each layer."""
    vocab, tokens = fields.integer("vocab_size_per_layer_input", 262144), fields.integer("vocab_size")
    if vocab < tokens:
        raise fields.error("vocab_size_per_layer_input", f"({vocab}) must be at least vocab_size ({tokens})")
    return vocab


def _gemma4_ropes(fields: Fields, sizes: Sizes, types: tuple[str, ...], head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotations of layers with a window, and of those without, whose heads have `head_dim`."""
    for key in ("rope_scaling", "rope_theta", "partial_rotary_factor"):
        if fields.has(key):
            raise fields.error(key, "is not supported for gemma4_text, whose layers have rope_parameters of their kind")
    full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    usual, found = {SLIDING: {"rope_type": "default"}, FULL: full}, fields.section("rope_parameters")
    if unknown := sorted(found.values.keys() - set(usual)):
        raise found.error(unknown[0], f"is not supported (supported: {', '.join(usual)})")
    absent = {kind: each for kind, each in usual.items() if not found.values or kind not in types}
    ropes = Fields(fields.where, {"rope_parameters": absent | found.values})
    sliding, full_ones = (
        parse_rope(ropes, sizes.max_positions, dim, kind_of_layers=kind, proportional=True)
        for kind, dim in ((SLIDING, sizes.head_dim), (FULL, head_dim))
    )
    return sliding, full_ones


_DEFAULTS = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256}
_GEMMA2 = Family(
    "Gemma2ForCausalLM", 8192, _gemma2, qkv_bias=None, o_bias=None, kv_heads=4, slides="types",
    act_key="hidden_activation",
    defaults=_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    differs="norms before and after each block, of which the weight lacks 1; soft caps; sliding window by layer",
)  # fmt: skip
_SIZES = {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
FAMILIES = {
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2, architecture="Gemma3ForCausalLM", max_positions=131072, read=_gemma3, rope_theta=1e6,
        defaults=_DEFAULTS | _SIZES | {"num_attention_heads": 8},
        differs="as Gemma 2 without soft caps; norms of each q and k head; two rotations",
    ),
    "gemma4_text": replace(
        _GEMMA2, architecture="Gemma4ForCausalLM", max_positions=131072, read=_gemma4,
        defaults={"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256}
        | {"vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30}
        | {"num_attention_heads": 8},
        differs="as Gemma 3; other heads in layers without a window; KV shared by layers; inputs of each layer",
    ),
}  # fmt: skip
