"""OLMo 2 and 3, and EXAONE 4: norms after the blocks only."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.families.common import by_type, every, expect, plain_decoder, window_or_none, without_ropes
from baton.engine.models.json_fields import Fields
from baton.engine.models.rope import NO_ROPE, parse_rope
from baton.engine.models.spec import DecoderSpec, Family, HeadNormSpec, Names, Sizes

NAMES = Names(
    before_attention="",
    after_attention="post_attention_layernorm",
    before_mlp="",
    after_mlp="post_feedforward_layernorm",
)


def _olmo2(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    spec = plain_decoder(fields, sizes, family)
    return replace(spec.with_attention(head_norm=HeadNormSpec(spec.norm, over="width")), names=NAMES)


def _olmo3(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    """Only layers without a window have the scaling of rotations. Transformers reads `rope_theta` for them only."""
    expect(fields, "rope_theta", family.rope_theta)
    own, local = without_ropes(fields), fields.section("rope_parameters").section("sliding_attention").values
    spec = by_type(fields, _olmo2(own, sizes, family), every(sizes.layers, 4), window_or_none(fields), 1)
    size = (sizes.max_positions, sizes.head_dim, family.rope_theta)
    sliding = parse_rope(Fields(fields.where, own.values | {"rope_parameters": local}), *size)
    return replace(spec, ropes=(sliding, parse_rope(fields, *size, kind_of_layers="full_attention")))


def _exaone4(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    """If there is a window, layers without it do not rotate."""
    spec, window = plain_decoder(fields, sizes, family), window_or_none(fields)
    patterned = window is not None and not fields.has("layer_types")
    types = every(sizes.layers, fields.integer("sliding_window_pattern", 4) if patterned else 1)
    spec = by_type(fields, spec, types, window, 0 if window is None else 1)
    return replace(spec, ropes=(*spec.ropes, NO_ROPE), names=NAMES)


_OLMO2 = Family(
    "Olmo2ForCausalLM", 2048, _olmo2, qkv_bias=None, o_bias=None, norm_eps=1e-5,
    differs="norms after each block only; norms of all q and all k heads together",
)  # fmt: skip
FAMILIES = {
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2, architecture="Olmo3ForCausalLM", read=_olmo3, rope_theta=5e5, slides="types",
        differs="as OLMo 2; sliding window by layer; two rotations",
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM", 2048, _exaone4, qk_norm=True, norm_eps=1e-5, slides="types",
        differs="norms after each block only; norms of each q and k head; sliding window by layer, else no rotation",
    ),
}  # fmt: skip
