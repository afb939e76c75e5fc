"""Gemma 2, and the text models of Gemma 3."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.families.common import by_type, every, expect, plain_decoder, window_or_none, without_ropes
from baton.engine.models.json_fields import Fields
from baton.engine.models.rope import parse_rope
from baton.engine.models.spec import DecoderSpec, Family, HeadNormSpec, HeadSpec, Names, Sizes

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
}  # fmt: skip
