"""Cohere's Command R and Command A (Cohere 1 and 2)."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.families.common import by_type, every, expect, plain_decoder, window_or_none
from baton.engine.models.json_fields import Fields
from baton.engine.models.rope import NO_ROPE
from baton.engine.models.spec import DecoderSpec, Family, HeadNormSpec, HeadSpec, Names, NormSpec, Sizes


def _cohere(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    """Return the spec. Rotations hold up to `model_max_length`, which may be above `max_position_embeddings`."""
    spec = plain_decoder(fields, sizes, family)
    rope = spec.ropes[0]
    if rope.kind == "default":
        rope = replace(rope, limit=max(rope.limit, fields.integer("model_max_length", rope.limit)))
    norm = NormSpec(fields.number(family.eps_key, family.norm_eps), "layer")
    norms = HeadNormSpec(norm, over="heads") if fields.flag("use_qk_norm", False) else None
    return replace(
        spec.with_attention(head_norm=norms),
        norm=norm,
        ropes=(rope,),
        head=HeadSpec(scale=fields.number("logit_scale", 0.0625)),
        parallel=True,
        interleaved=True,
        names=Names(before_mlp=""),
    )


def _cohere2(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    """Only layers with a window rotate."""
    for key, value in {"use_qk_norm": False, "use_parallel_block": True, "use_gated_activation": True}.items():
        expect(fields, key, value)
    types = every(sizes.layers, fields.integer("sliding_window_pattern", 4))
    spec = by_type(fields, _cohere(fields, sizes, family), types, window_or_none(fields), 1)
    return replace(spec, ropes=(*spec.ropes, NO_ROPE))


_COHERE = Family(
    "CohereForCausalLM", 8192, _cohere, qkv_bias=None, o_bias=None, norm_eps=1e-5, eps_key="layer_norm_eps",
    rope_theta=5e5, defaults={"tie_word_embeddings": True},
    differs="layer norms without bias; attention and network read the same rows; interleaved rotation; logits scaled",
)  # fmt: skip
FAMILIES = {
    "cohere": _COHERE,
    "cohere2": replace(
        _COHERE, architecture="Cohere2ForCausalLM", read=_cohere2, rope_theta=10000.0, slides="types",
        differs="as Cohere; sliding window by layer, else no rotation",
    ),
}  # fmt: skip
