"""The meaning of config.json: defaults, sliding windows, rotary scaling, experts, and latent attention."""

import dataclasses
from typing import Any

import hypothesis
import pytest
import torch
import transformers
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

from baton.engine.models.config import ModelConfig, parse_config
from baton.engine.models.config_variants import ExpertsConfig, LatentConfig
from baton.engine.models.families import FAMILIES
from baton.engine.models.json_fields import Fields
from baton.engine.models.loading import _check_device, _max_model_len
from baton.engine.models.rope import ROPE_TYPES, RopeConfig
from baton.engine.models.rotary import inverse_frequencies
from baton.errors import CheckpointError, ConfigError

SHAPE = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
SHAPE |= {"num_attention_heads": 8, "max_position_embeddings": 1024}
LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}


def parsed(model_type: str = "llama", **settings: Any) -> ModelConfig:
    values = {"model_type": model_type, **SHAPE, **settings}
    return parse_config(Fields("config.json", {k: v for k, v in values.items() if v is not ...}))


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 2.5},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0},
        {"type": "yarn", "factor": 4.0},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "truncate": False},
        {"type": "yarn", "factor": 8, "original_max_position_embeddings": 128, "beta_fast": 20, "beta_slow": 2},
        {"rope_type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.5},
        {"rope_type": "yarn", "factor": 40, "mscale": 1.0},
        {"rope_type": "yarn", "original_max_position_embeddings": 256, "factor": None},
        {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.25},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10**6},
    ],
)
@pytest.mark.parametrize("head_dim", [16, 64])
def test_rope_both_spellings(scaling: dict[str, Any], head_dim: int):
    """Frequencies and attention factor equal those of transformers bit for bit in both spellings."""
    kind = scaling.get("rope_type") or scaling["type"]
    named = {key: value for key, value in scaling.items() if key != "type"} | {"rope_type": kind}
    oracle = transformers.LlamaConfig(**SHAPE, head_dim=head_dim, rope_scaling=dict(scaling), rope_theta=5e4)
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[kind](oracle, "cpu")
    old = {"rope_scaling": dict(scaling), "rope_theta": 5e4}
    for spelling in (old, {"rope_parameters": named | {"rope_theta": 5e4}}):
        rope = parsed(head_dim=head_dim, **spelling).spec.ropes[0]
        assert torch.equal(inverse_frequencies(rope), inv_freq)
        assert rope.attention_factor == attention_factor


def test_attn_factor_multiplies_the_usual_factor_of_yarn():
    """vLLM and SGLang read it so, and transformers does not. DeepSeek-R1-0528-Qwen3-8B cancels the usual factor."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "extrapolation_factor": 1.0}
    found = parsed(rope_scaling=yarn | {"attn_factor": 0.8782488562869419}).spec.ropes[0]
    assert found.attention_factor == pytest.approx(1.0, rel=1e-9)
    both = {"mscale": 1.0, "mscale_all_dim": 0.5}
    usual, twice = (parsed(rope_scaling=yarn | both | more).spec.ropes[0] for more in ({}, {"attn_factor": 2}))
    assert twice.attention_factor == 2 * usual.attention_factor


@pytest.mark.parametrize(("tuning", "warms_up"), [(True, True), (4, True), (False, False), (0, False)])
def test_the_temperature_of_llama_4_is_a_flag_or_a_number(tuning: bool | int, warms_up: bool):
    layers = parsed("llama4_text", attn_temperature_tuning=tuning, no_rope_layers=[1, 1, 0]).spec.attention
    assert [each.temperature is not None for each in layers] == [False, False, warms_up]


@pytest.mark.parametrize(("beta", "grows"), [(0.1, True), (0, False), (0.0, False)])
def test_queries_of_ministral_3_do_not_grow_by_0(beta: float, grows: bool):
    """Mistral Medium 3.5 has 0."""
    rope = {"rope_type": "default", "llama_4_scaling_beta": beta, "original_max_position_embeddings": 256}
    assert bool(parsed("ministral3", rope_parameters=rope).spec.attention[0].temperature) == grows


def test_a_null_activation_is_that_of_the_family():
    gemma, llama = (parsed(family, hidden_activation=None, hidden_act=None).spec.mlp for family in ("gemma2", "llama"))
    assert (gemma.activation, llama.activation) == ("gelu_tanh", "silu")


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "llama"])
@pytest.mark.parametrize(("section", "limit"), [({}, 262144), ({"original_max_position_embeddings": 2048}, 2048)])
def test_dual_chunk_attention_ends_at_its_original_length(family: str, section: dict[str, Any], limit: int):
    """Beyond it, positions of other chunks would count in another way. Qwen2.5-7B-Instruct-1M has it."""
    config = parsed(family, max_position_embeddings=1010000, dual_chunk_attention_config=section)
    assert (config.max_positions, _max_model_len(config, limit)) == (limit, limit)
    with pytest.raises(ConfigError, match=f"between 1 and {limit}"):
        _max_model_len(config, limit + 1)


@pytest.mark.parametrize(
    ("family", "settings", "limit"),
    [
        ("cohere", {"model_max_length": 4096}, 4096),
        ("cohere2", {"model_max_length": 4096}, 4096),
        ("cohere", {"model_max_length": 512}, 1024),
        ("cohere", {"model_max_length": 4096, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, 1024),
        ("llama", {"model_max_length": 4096}, 1024),
    ],
)
def test_command_r_may_be_longer_than_its_positions(family: str, settings: dict[str, Any], limit: int):
    config = parsed(family, **settings)
    assert (config.max_positions, _max_model_len(config, limit)) == (1024, limit)
    with pytest.raises(ConfigError, match=f"between 1 and {limit}"):
        _max_model_len(config, limit + 1)


@pytest.mark.parametrize(
    ("settings", "theta"),
    [
        ({}, 10000.0),
        ({"rope_theta": 500000}, 500000.0),
        ({"rope_theta": 500000, "rope_scaling": None}, 500000.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6),
        ({"rope_theta": 7.5, "rope_parameters": {"rope_theta": 1e6}}, 1e6),
    ],
)
def test_rope_theta(settings: dict[str, Any], theta: float):
    rope = parsed(**settings).spec.ropes[0]
    assert (rope.kind, rope.theta, rope.attention_factor, rope.limit) == ("default", theta, 1.0, 1024)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "axial", "factor": 2}, "rope_scaling: rope_type 'axial' is not supported .*llama3, yarn"),
        ({"rope_type": "longrope", "short_factor": [1, 0, 1, 1]}, "short_factor must be a list of 4 numbers above 0"),
        ({"rope_type": "proportional", "partial_rotary_factor": 0.5}, "rope_type 'proportional' is not supported"),
        ({"rope_type": 3}, "rope_type must be a string, got 3"),
        ("linear", "rope_scaling must be an object, got 'linear'"),
        ({"type": "linear"}, "factor is missing"),
        ({"type": "linear", "factor": "2"}, "factor must be a number .* got '2'"),
        ({"type": "linear", "factor": 0}, "factor must be a number"),
        ({"type": "dynamic", "factor": None}, "factor is missing"),
        ({"type": "llama3", "factor": 2}, "low_freq_factor is missing"),
        ({"type": "llama3", **LLAMA3, "low_freq_factor": 5}, "high_freq_factor must be at least low_freq_factor"),
        ({"type": "yarn", "factor": 2, "truncate": 1}, "truncate must be true or false"),
        ({"type": "yarn", "factor": 2, "beta_fast": -1}, "beta_fast must be a number"),
        ({"type": "yarn", "factor": 2, "mscale": -1}, "mscale must be a number"),
        ({"type": "yarn", "factor": 2, "attn_factor": 0}, "rope_scaling: attn_factor must be a number .* got 0"),
        ({"type": "yarn", "factor": 2, "extrapolation_factor": 0.5}, "extrapolation_factor must be 1, got 0.5"),
        ({"type": "yarn", "factor": 2, "original_max_position_embeddings": 0.5}, "must be a whole number"),
        ({"rope_type": "default", "rope_theta": 1}, "rope_theta must be a number between 1"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
        ({"full_attention": {"rope_type": "default"}}, "for each layer type is not supported"),
    ],
)
def test_rope_errors(rope: Any, message: str):
    with pytest.raises(CheckpointError, match=message):
        parsed(rope_scaling=rope)


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        ({"type": "linear", "factor": 2.0}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 1024),
        ({"type": "llama3", **LLAMA3}, 1024),
        ({"type": "dynamic", "factor": 4.0}, 1024),
    ],
)
def test_scaled_positions_may_be_asked_for(scaling: dict[str, Any], limit: int):
    config = parsed(rope_scaling=scaling)
    assert _max_model_len(config, None) == 1024
    assert _max_model_len(config, limit) == limit
    why = "dynamic RoPE scaling ends at the original length.*" if scaling["type"] == "dynamic" else ""
    with pytest.raises(ConfigError, match=f"between 1 and {limit}.*{why} got {limit + 1}"):
        _max_model_len(config, limit + 1)


def sliding(model_type: str, **settings: Any) -> tuple[int | None, ...]:
    return tuple(layer.reach.window for layer in parsed(model_type, **settings).spec.attention)


def test_sliding_windows_as_transformers_treats_them():
    on = {"use_sliding_window": True, "sliding_window": 20}
    types = ["full_attention", "sliding_attention", "full_attention"]
    assert sliding("llama", sliding_window=20) == sliding("mistral", sliding_window=None) == (None, None, None)
    assert sliding("mistral") == (4096, 4096, 4096)
    assert sliding("mistral", sliding_window=20) == (20, 20, 20)
    assert sliding("qwen2", sliding_window=20, max_window_layers=0) == (None, None, None)
    assert sliding("qwen2", **on, max_window_layers=2) == (None, None, 20)
    assert sliding("qwen3", **on) == (None, None, None)  # without max_window_layers it is 28
    assert sliding("qwen3", **on, layer_types=types) == (None, 20, None)
    assert sliding("qwen3", use_sliding_window=True, sliding_window=None, max_window_layers=0) == (None, None, None)
    assert sliding("mixtral") == sliding("mixtral", sliding_window=None) == (None, None, None)
    assert sliding("mixtral", sliding_window=20) == (20, 20, 20)
    assert sliding("qwen3_moe", sliding_window=20) == sliding("deepseek_v3", sliding_window=20) == (None, None, None)
    assert sliding("qwen3_moe", **on, max_window_layers=2) == (20, 20, 20)
    with pytest.raises(CheckpointError, match="layer_types contains sliding_attention, but no sliding window is set"):
        sliding("qwen2", sliding_window=20, layer_types=types)
    for model_type in ("mistral", "qwen3_moe"):
        with pytest.raises(CheckpointError, match=f"layer_types must be sliding_attention in all {model_type} layers"):
            sliding(model_type, **on, layer_types=types)
    with pytest.raises(CheckpointError, match="sliding_window must be a whole number"):
        sliding("mistral", sliding_window=0)


def test_defaults_of_the_families():
    assert (parsed("llama").kv_heads, parsed("qwen2").kv_heads, parsed("mistral").kv_heads) == (8, 8, 8)
    assert parsed("mistral", num_attention_heads=16).kv_heads == 8
    assert parsed("mistral", num_attention_heads=16, num_key_value_heads=None).kv_heads == 16
    assert (parsed("llama").head_dim, parsed("qwen3").head_dim, parsed("qwen3", head_dim=32).head_dim) == (8, 128, 32)
    assert parsed("qwen2", max_position_embeddings=...).max_positions == 32768
    layers = {name: parsed(name).spec.attention[0] for name in ("qwen2", "llama", "qwen3")}
    assert [(layer.qkv_bias, layer.o_bias) for layer in layers.values()] == [(True, False), *[(False, False)] * 2]
    assert [layer.head_norm is not None for layer in layers.values()] == [False, False, True]


V2 = {"num_experts_per_tok": 2}  # it has no default
SLIDING = "sliding_attention"
for_model = AutoConfig.for_model


def experts(family: str, **settings: Any) -> ExpertsConfig:
    found = parsed(family, **settings).experts
    assert found is not None
    return found


def latent(family: str, **settings: Any) -> LatentConfig:
    found = parsed(family, **V2 | settings).latent
    assert found is not None
    return found


def test_dense_families_have_neither():
    assert (parsed("llama").experts, parsed("qwen3").latent) == (None, None)
    assert (parsed("qwen3_moe").latent, parsed("llama").kv_tensors) == (None, ("k", "v"))


@pytest.mark.parametrize(
    ("family", "name", "inner"), [("mixtral", "num_local_experts", 96), ("qwen3_moe", "num_experts", 768)]
)
def test_defaults_of_mixtral_and_qwen3_moe(family: str, name: str, inner: int):
    theirs, config, found = for_model(family), parsed(family, max_position_embeddings=...), experts(family)
    assert (found.count, found.per_token) == (getattr(theirs, name), theirs.num_experts_per_tok)
    assert (found.inner, found.sparse) == (inner, (True,) * 3)
    assert found.normalised is getattr(theirs, "norm_topk_prob", True)
    assert (config.spec.ropes[0].theta, config.spec.norm.eps) == (
        theirs.rope_parameters["rope_theta"],
        theirs.rms_norm_eps,
    )
    assert (config.max_positions, config.kv_heads) == (theirs.max_position_embeddings, theirs.num_key_value_heads)
    assert (config.head_dim, config.spec.attention[0].head_norm is not None) == (8, family == "qwen3_moe")


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_defaults_of_deepseek(family: str):
    theirs, config = for_model(family), parsed(family, **V2, max_position_embeddings=..., n_group=1, topk_group=1)
    found, widths = experts(family, **V2), latent(family)
    assert (found.count, found.inner) == (theirs.n_routed_experts, theirs.moe_intermediate_size)
    assert found.shared_inner == theirs.n_shared_experts * theirs.moe_intermediate_size
    assert (found.scaling, found.normalised) == (theirs.routed_scaling_factor, theirs.norm_topk_prob)
    assert found.sparse == tuple(i >= theirs.first_k_dense_replace for i in range(3))
    assert (widths.query_rank, widths.rank) == (theirs.q_lora_rank, theirs.kv_lora_rank)
    assert (widths.nope_dim, widths.rope_dim) == (theirs.qk_nope_head_dim, theirs.qk_rope_head_dim)
    assert (widths.value_dim, widths.interleaved) == (theirs.v_head_dim, True)
    assert (config.kv_tensors, config.kv_heads, config.head_dim) == (("latent",), 1, widths.width)
    assert (config.spec.rotated, config.max_positions) == (theirs.qk_rope_head_dim, theirs.max_position_embeddings)


def test_groups_of_deepseek_v3():
    theirs, found = for_model("deepseek_v3"), experts("deepseek_v3")
    assert (found.groups, found.best_groups, found.per_token) == (8, 4, 8)
    assert (theirs.n_group, theirs.topk_group, theirs.num_experts_per_tok) == (8, 4, 8)
    assert (experts("deepseek_v2", **V2, n_group=8, topk_group=3).groups) == 1  # greedy routing has no groups


def test_which_layers_are_sparse():
    assert experts("qwen3_moe", decoder_sparse_step=2).sparse == (False, True, False)
    assert experts("qwen3_moe", mlp_only_layers=[0, 2, 77]).sparse == (False, True, False)
    assert experts("qwen3_moe", mlp_only_layers=[1], decoder_sparse_step=2).sparse == (False,) * 3
    assert experts("deepseek_v2", **V2, first_k_dense_replace=1).sparse == (False, True, True)
    assert experts("deepseek_v3", first_k_dense_replace=9).sparse == (False,) * 3


def test_number_of_experts_in_both_spellings():
    assert experts("qwen3_moe", num_experts=16).count == experts("qwen3_moe", num_local_experts=16).count == 16
    with pytest.raises(CheckpointError, match=r"num_experts \(16\) contradicts num_local_experts \(8\)"):
        experts("qwen3_moe", num_experts=16, num_local_experts=8)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "mscale_all_dim": 1.0},
        {"rope_type": "yarn", "factor": 40.0},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
        {"rope_type": "yarn", "factor": 4, "mscale_all_dim": 1.0, "attention_factor": 1.5},
        {"rope_type": "linear", "factor": 3.0, "mscale_all_dim": 0.5},
        {"rope_type": "yarn", "factor": 0.5, "mscale_all_dim": 0.5},
    ],
)
def test_softmax_factor(rope: dict[str, Any]):
    config = parsed("deepseek_v3", rope_scaling=rope)
    assert config.spec.ropes[0].softmax_factor == pytest.approx(yarn_apply_mscale(rope, 1.0), rel=1e-12)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) must be at most the 8 eligible experts"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts must be a whole number from 1"),
        ("qwen3_moe", {"mlp_only_layers": [1.5]}, "mlp_only_layers must be a list of whole numbers"),
        ("qwen3_moe", {"mlp_only_layers": [True]}, "mlp_only_layers must be a list of whole numbers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number from 1"),
        ("deepseek_v2", {}, "num_experts_per_tok is missing"),
        ("deepseek_v2", V2 | {"norm_topk_prob": True}, "norm_topk_prob true is not supported for deepseek_v2"),
        (
            "deepseek_v2",
            V2 | {"scoring_func": "sigmoid"},
            "scoring_func must be 'softmax' for this model, got 'sigmoid'",
        ),
        ("deepseek_v2", V2 | {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported .*greedy"),
        ("deepseek_v2", V2 | {"topk_method": "group_limited_greedy"}, "n_group is missing"),
        ("deepseek_v2", V2 | {"moe_layer_freq": 2}, "moe_layer_freq must be 1 for this model, got 2"),
        ("gemma4_text", {"enable_moe_block": True}, "enable_moe_block must be False for this model, got True"),
        (
            "gemma4_text",
            {"per_layer_config": {"0": {"head_dim": 4}}},
            r"must have the same entry .* layer \(2\), and no",
        ),
        (
            "gemma4_text",
            {"per_layer_config": {"2": {"x": 1}}},
            "per_layer_config: 2: x is not supported .*head_dim, num",
        ),
        (
            "gemma4_text",
            {"per_layer_config": {"2": {"head_dim": 5}}},
            "per_layer_config: 2: head_dim must be even .* 5",
        ),
        (
            "gemma4_text",
            {"per_layer_config": {"2": {"num_key_value_heads": 16}}},
            r"per_layer_config: 2: num_key_value_heads \(16\) must divide num_attention_heads \(8\)",
        ),
        (
            "gemma4_text",
            {"attention_k_eq_v": True, "num_global_key_value_heads": 16},
            r"json: num_global_key_value_heads \(16\) must divide num_attention_heads \(8\)",
        ),
        ("gemma4_text", {"global_head_dim": 7}, "global_head_dim must be even for rotary embeddings, got 7"),
        ("gemma4_text", {"global_head_dim": 2**17}, "global_head_dim must be a whole number from 1 to 65536"),
        (
            "gemma4_text",
            {"vocab_size_per_layer_input": 99},
            r"vocab_size_per_layer_input \(99\) must be at least vocab_size \(100\)",
        ),
        ("gemma4_text", {"sliding_window": None}, "contains sliding_attention, but no sliding window is set"),
        ("gemma4_text", {"rope_theta": 1e6}, "json: rope_theta is not supported for gemma4_text"),
        ("gemma4_text", {"rope_scaling": {"factor": 2}}, "json: rope_scaling is not supported for gemma4_text"),
        (
            "gemma4_text",
            {"rope_parameters": {"rope_theta": 1e6}},
            "rope_parameters: rope_theta is not supported .*full",
        ),
        ("gemma4_text", {"rope_parameters": {SLIDING: {}}}, "rope_parameters: full_attention is missing"),
        (
            "gemma4_text",
            {"rope_parameters": {SLIDING: {}, "full_attention": {"rope_type": "x"}}},
            "rope_parameters: full_attention: rope_type 'x' is not supported .*proportional",
        ),
        ("gemma4_text", {"num_kv_shared_layers": 3}, r"\(3\) leaves no full_attention layer with keys and values"),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank must be a number, because the indexer reads"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid' for this model, got 'softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method must be 'noaux_tc' for this model, got 'greedy'"),
        ("deepseek_v3", {"n_group": 7}, r"n_group \(7\) must divide the number of experts \(256\)"),
        ("deepseek_v3", {"topk_group": 9}, r"topk_group \(9\) must be at most n_group \(8\)"),
        ("deepseek_v3", {"n_routed_experts": 8}, r"num_experts_per_tok \(8\) must be at most the 4 eligible experts"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even for rotary embeddings, got 7"),
        ("deepseek_v3", {"num_key_value_heads": 2}, r"num_key_value_heads must be num_attention_heads \(8\)"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "quark"}}, "quant_method 'quark'"),
    ],
)
def test_experts_and_latent_attention_that_are_refused(family: str, settings: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        parsed(family, **settings)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be False"),
        ("gemma2", {"sliding_window": None}, "layer_types contains sliding_attention, but no sliding window is set"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null for gemma3_text"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters: full_attention is missing"),
        ("olmo3", {"rope_theta": 1e6}, "rope_theta must be 500000.0 for this model, got 1000000.0"),
        ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_type 'yarn' is not supported for phi3"),
        ("phi3", {"partial_rotary_factor": 0.4}, r"partial_rotary_factor \(0.4\) must rotate an even number of 8"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias must be False"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm must be false .* set model.backend: transformers"),
        (
            "ministral3",
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": -0.1}},
            "llama_4_scaling_beta must be a number between -1e-06 and inf, got -0.1",
        ),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block must be True"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list must be 1 for all layers"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla must be False"),
        ("arcee", {"hidden_act": "tanh"}, "hidden_act 'tanh' is not supported .*relu2"),
        ("apertus", {}, "rope_parameters is missing"),
        ("gpt_oss", {}, "rope_scaling is missing"),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, "no_rope_layers must have 3 entries, each 0 or 1"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 3}, "layer_types 'sliding_attention' is not supported"),
        ("llama4_text", {"attn_temperature_tuning": -1}, "tuning must be a whole number from 0 to .*, got -1"),
        ("llama4_text", {"attn_temperature_tuning": "4"}, "attn_temperature_tuning must be true or false, got '4'"),
        ("gemma3", {}, "text_config is missing"),
        ("mistral3", {"text_config": {"model_type": "gpt2"}}, "text_config: model_type 'gpt2' is not supported"),
    ],
)
def test_settings_of_families_that_are_refused(family: str, settings: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        parsed(family, **settings)


@pytest.mark.parametrize(
    ("settings", "heads"),
    [
        ({}, (512, 4)),
        ({"num_global_key_value_heads": 2}, (512, 4)),
        ({"num_global_key_value_heads": 2, "attention_k_eq_v": True, "global_head_dim": 32}, (32, 2)),
        ({"per_layer_config": {}}, (256, 4)),  # no layer differs
        ({"per_layer_config": {"2": {"num_key_value_heads": 1}}}, (256, 1)),
        ({"per_layer_config": {"2": {"head_dim": 32}}, "global_head_dim": 64}, (32, 4)),
    ],
)
def test_heads_of_gemma_4_in_both_spellings(settings: dict[str, Any], heads: tuple[int, int]):
    """They are those of transformers in the last layer, the only one without a window."""
    config, theirs = parsed("gemma4_text", **settings), for_model("gemma4_text", **SHAPE, **settings)
    other, last = theirs.per_layer_config[0], theirs.per_layer_config[2]
    assert (config.head_dim, config.kv_heads) == (other.head_dim, other.num_key_value_heads) == (256, 4)
    assert (last.head_dim, last.num_key_value_heads) == heads
    assert (config.spec.attention[2].head_dim, config.spec.attention[2].kv_heads) == heads
    assert bool(config.cache_order) == (heads != (256, 4))


def test_the_names_of_kimi_k2_and_of_text_models():
    assert parsed("kimi_k2", architectures=["DeepseekV3ForCausalLM"]).family == "deepseek_v3"
    whole = parsed("mistral3", text_config={**SHAPE, "model_type": "mistral", "tie_word_embeddings": False})
    assert (whole.family, whole.tied, whole.wrapped) == ("mistral", True, True)


@pytest.mark.parametrize(("family", "part"), [("gemma2", "soft caps"), ("llama4_text", "chunked attention")])
def test_parts_that_gpus_lack(family: str, part: str):
    config = parsed(family, attention_chunk_size=64)
    with pytest.raises(CheckpointError, match=f"{family} has {part}, not supported on cuda, only on CPUs"):
        _check_device(config, "none", torch.device("cuda"))


def test_queries_at_once_or_by_way_of_a_narrow_row():
    assert latent("deepseek_v2", q_lora_rank=None).query_rank is None
    assert latent("deepseek_v2").query_rank == 1536
    assert latent("deepseek_v2", rope_interleave=False).interleaved  # V2 has only the interleaved form
    assert not latent("deepseek_v3", rope_interleave=False).interleaved


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text(max_size=5), SCALARS, max_size=3))
KEYS = """
vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings head_dim
num_key_value_heads layer_types sliding_window use_sliding_window hidden_act quantization_config rope_theta dtype
num_experts num_local_experts num_experts_per_tok moe_intermediate_size n_group topk_group n_routed_experts
n_shared_experts first_k_dense_replace mlp_only_layers decoder_sparse_step topk_method scoring_func moe_layer_freq
routed_scaling_factor norm_topk_prob q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim
num_nextn_predict_layers rms_norm_eps embedding_multiplier residual_multiplier attention_multiplier logits_scaling
no_rope_layers no_rope_layer_interval attention_bias use_bias query_pre_attn_scalar attn_logit_softcapping
final_logit_softcapping sliding_window_pattern partial_rotary_factor rotary_dim logit_scale use_qk_norm moe_layers
attention_chunk_size floor_scale attn_scale swiglu_limit interleave_moe_layer_step hidden_activation global_head_dim
num_global_key_value_heads attention_k_eq_v num_kv_shared_layers vocab_size_per_layer_input""".split()
ROPE_KEYS = [*(field.name for field in dataclasses.fields(RopeConfig)), "mscale", "mscale_all_dim", "rope_theta"]
ROPE_KEYS += ["original_max_position_embeddings", "partial_rotary_factor", "alpha", "llama_4_scaling_beta"]
ROPE_KEYS += ["attn_factor", "extrapolation_factor"]


@pytest.mark.slow
@hypothesis.settings(max_examples=400)
@hypothesis.given(
    st.sampled_from(sorted(FAMILIES)),
    st.dictionaries(st.sampled_from(KEYS), VALUES | st.integers(1, 9), max_size=4),
    st.sampled_from((*ROPE_TYPES, "proportional")),
    st.just({}) | st.dictionaries(st.sampled_from(ROPE_KEYS), st.floats(min_value=0), min_size=3),
)
def test_any_json_is_parsed_or_refused(family: str, values: dict[str, Any], kind: str, rope: dict[str, Any]):
    """An untrusted config raises no other exception, and gives no NaN."""
    try:
        ropes: dict[str, Any] = {"factor": 2.0, **rope, "rope_type": kind}
        if family == "gemma4_text":
            ropes = {SLIDING: ropes, "full_attention": ropes}
        config = parsed(family, rope_parameters=ropes, **V2 | values)
    except CheckpointError:
        return
    assert not inverse_frequencies(config.spec.ropes[0]).isnan().any()
    assert all(each.scale > 0 for each in config.spec.attention)
    assert config.experts is None or config.experts.per_token <= config.experts.count
