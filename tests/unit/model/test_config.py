"""The meaning of config.json: defaults, sliding windows, and both spellings of rotary scaling."""

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from baton.engine.models.config import FAMILIES, ModelConfig, parse_config
from baton.engine.models.json_fields import Fields
from baton.engine.models.loading import _max_model_len
from baton.engine.models.rope import ROPE_TYPES, RopeConfig, inverse_frequencies
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
        rope = parsed(head_dim=head_dim, **spelling).rope
        assert torch.equal(inverse_frequencies(rope), inv_freq)
        assert rope.attention_factor == attention_factor


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
    rope = parsed(**settings).rope
    assert (rope.kind, rope.theta, rope.attention_factor, rope.limit) == ("default", theta, 1.0, 1024)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope", "factor": 2}, "rope_scaling: rope_type 'longrope' is not supported .*llama3, yarn"),
        ({"rope_type": 3}, "rope_type must be a string, got 3"),
        ("linear", "rope_scaling must be an object, got 'linear'"),
        ({"type": "linear"}, "factor is missing"),
        ({"type": "linear", "factor": "2"}, "factor must be a number .* got '2'"),
        ({"type": "linear", "factor": 0}, "factor must be a number"),
        ({"type": "dynamic", "factor": None}, "factor is missing"),
        ({"type": "llama3", "factor": 2}, "low_freq_factor is missing"),
        ({"type": "llama3", **LLAMA3, "low_freq_factor": 4}, "high_freq_factor must be above low_freq_factor"),
        ({"type": "yarn", "factor": 2, "truncate": 1}, "truncate must be true or false"),
        ({"type": "yarn", "factor": 2, "beta_fast": -1}, "beta_fast must be a number"),
        ({"type": "yarn", "factor": 2, "mscale": -1}, "mscale must be a number"),
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
    return parsed(model_type, **settings).windows


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


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text(max_size=5), SCALARS, max_size=3))
KEYS = (*SHAPE, "head_dim", "num_key_value_heads", "layer_types", "sliding_window", "use_sliding_window", "hidden_act")
ROPE_KEYS = [*(field.name for field in dataclasses.fields(RopeConfig)), "mscale", "mscale_all_dim", "rope_theta"]


@given(
    st.sampled_from(sorted(FAMILIES)),
    st.dictionaries(st.sampled_from([*KEYS, "quantization_config", "rope_theta", "dtype"]), VALUES, max_size=3),
    st.sampled_from(ROPE_TYPES),
    st.dictionaries(
        st.sampled_from([*ROPE_KEYS, "original_max_position_embeddings"]), st.floats(min_value=0), min_size=3
    ),
)
def test_any_json_is_parsed_or_refused(family: str, settings: dict[str, Any], kind: str, rope: dict[str, Any]):
    """An untrusted config raises no other exception, and gives no NaN."""
    try:
        config = parsed(family, rope_parameters={"factor": 2.0, **rope, "rope_type": kind}, **settings)
    except CheckpointError:
        return
    assert not inverse_frequencies(dataclasses.replace(config.rope, head_dim=8)).isnan().any()


def test_defaults_of_the_families():
    assert (parsed("llama").kv_heads, parsed("qwen2").kv_heads, parsed("mistral").kv_heads) == (8, 8, 8)
    assert parsed("mistral", num_attention_heads=16).kv_heads == 8
    assert parsed("mistral", num_attention_heads=16, num_key_value_heads=None).kv_heads == 16
    assert (parsed("llama").head_dim, parsed("qwen3").head_dim, parsed("qwen3", head_dim=32).head_dim) == (8, 128, 32)
    assert parsed("qwen2", max_position_embeddings=...).max_positions == 32768
    biases = {name: (parsed(name).qkv_bias, parsed(name).o_bias, parsed(name).mlp_bias) for name in ("qwen2", "llama")}
    assert biases == {"qwen2": (True, False, False), "llama": (False, False, False)}
    assert (parsed("qwen3").qk_norm, parsed("qwen2").qk_norm) == (True, False)
