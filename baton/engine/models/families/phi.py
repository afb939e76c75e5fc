"""Phi-3 and Phi-4, and models with layer norms: Phi, StarCoder2, StableLM and Nemotron."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.families.common import activation, expect, plain_decoder, ungated
from baton.engine.models.json_fields import Fields
from baton.engine.models.spec import DecoderSpec, Family, HeadNormSpec, HeadSpec, MlpSpec, Names, NormSpec, Sizes


def _phi3(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    """`su` is the former name of longrope. Transformers reads yarn as longrope, too, so that is rejected."""
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        expect(fields, key, False)
    rope = fields.section("rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in ("default", "longrope", "su"):
        raise rope.error("rope_type", f"{kind!r} is not supported for phi3 (supported: default, longrope)")
    if kind == "su":
        fields = Fields(fields.where, fields.values | {"rope_scaling": rope.values | {"rope_type": "longrope"}})
    return replace(plain_decoder(fields, sizes, family), names=Names(qkv=("qkv_proj",), up=("gate_up_proj",)))


def _phi(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    norm = _layer_norm(fields, family)
    norms = HeadNormSpec(norm) if fields.flag("qk_layernorm", False) else None
    spec = plain_decoder(ungated(fields), sizes, family)
    return replace(
        spec.with_attention(head_norm=norms),
        mlp=MlpSpec(activation(fields, "hidden_act"), gated=False, bias=True),
        norm=norm,
        head=HeadSpec(bias=True),
        parallel=True,
        names=Names(
            norm="model.final_layernorm", o="dense", up=("fc1",), down="fc2", before_mlp="",
            q_norm="q_layernorm", k_norm="k_layernorm",
        ),
    )  # fmt: skip


def _starcoder2(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    bias = fields.flag("use_bias", True)
    spec = plain_decoder(ungated(fields), sizes, replace(family, qkv_bias=bias, o_bias=bias))
    mlp = MlpSpec(activation(fields, "hidden_act"), gated=False, bias=bias)
    return replace(spec, norm=_layer_norm(fields, family), mlp=mlp, names=Names(up=("c_fc",), down="c_proj"))


def _nemotron(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    norm = replace(_layer_norm(fields, family), plus_one=True)
    mlp = MlpSpec(activation(fields, "hidden_act"), gated=False, bias=fields.flag("mlp_bias", False))
    return replace(plain_decoder(ungated(fields), sizes, family), norm=norm, mlp=mlp, names=Names(up=("up_proj",)))


def _stablelm(fields: Fields, sizes: Sizes, family: Family) -> DecoderSpec:
    if fields.flag("qk_layernorm", False):
        text = "must be false for this model, got true; set model.backend: transformers if no weights are quantised"
        raise fields.error("qk_layernorm", text)
    spec = plain_decoder(fields, sizes, replace(family, qkv_bias=fields.flag("use_qkv_bias", False)))
    parallel = fields.flag("use_parallel_residual", False)
    names = Names(before_mlp="") if parallel else Names()
    return replace(spec, norm=_layer_norm(fields, family), parallel=parallel, names=names)


def _layer_norm(fields: Fields, family: Family) -> NormSpec:
    return NormSpec(fields.number(family.eps_key, family.norm_eps), "layer", bias=True)


FAMILIES = {
    "phi3": Family(
        "Phi3ForCausalLM", 4096, _phi3, norm_eps=1e-5, partial=1.0, slides="all", window=None,
        defaults={"original_max_position_embeddings": 4096},
        differs="fused projections; a share of dimensions rotates; longrope",
    ),
    "phi": Family(
        "PhiForCausalLM", 2048, _phi, qkv_bias=True, o_bias=True, norm_eps=1e-5, eps_key="layer_norm_eps", partial=0.5,
        defaults={"hidden_act": "gelu_new"},
        differs="layer norms; attention and a network that is not gated read the same rows; biases everywhere",
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM", 4096, _starcoder2, kv_heads=2, norm_eps=1e-5, eps_key="norm_epsilon", slides="all",
        window=None, defaults={"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
        differs="layer norms; a network that is not gated; biases by `use_bias`",
    ),
    "nemotron": Family(
        "NemotronForCausalLM", 4096, _nemotron, qkv_bias=None, o_bias=None, norm_eps=1e-5, eps_key="norm_eps",
        partial=0.5, defaults={"hidden_act": "relu2"},
        differs="layer norms, of which the weight lacks 1; a network that is not gated, with relu squared",
    ),
    "stablelm": Family(
        "StableLmForCausalLM", 4096, _stablelm, norm_eps=1e-5, eps_key="layer_norm_eps", partial=0.25,
        differs="layer norms; a quarter of dimensions rotates; biases by `use_qkv_bias`",
    ),
}  # fmt: skip
