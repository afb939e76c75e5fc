"""config.json of models with recurrent layers: defaults of `transformers`, and rejections."""

import json
import math
from typing import Any

import pytest

from baton.engine.models.config import ModelConfig, parse_config
from baton.engine.models.json_fields import Fields
from baton.engine.models.recurrent.spec import MambaSpec
from baton.errors import CheckpointError
from tests.unit.model.checkpoints import CONV, FOUR, RECURRENT, class_of

NEEDED = {"vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "architectures", "model_type"}
NEEDED |= {"num_hidden_layers", "layers_block_type"}


def settings_of(family: str, **changes: Any) -> dict[str, Any]:
    """Return config.json as transformers writes it, with all keys."""
    found = json.loads(class_of(family).config_class(**changes).to_json_string(use_diff=False))
    return found | {"architectures": [class_of(family).__name__]}


def parsed(settings: dict[str, Any]) -> ModelConfig:
    return parse_config(Fields("config.json", settings))


TYPES: dict[str, dict[str, Any]] = {
    "lfm2_moe": {"layer_types": CONV * 8},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
}


@pytest.mark.parametrize("family", sorted({variant.family for variant in RECURRENT.values()}))
def test_absent_keys_mean_the_defaults_of_transformers(family: str):
    whole, types = settings_of(family, **TYPES.get(family, {})), TYPES.get(family, {})
    assert parsed({key: whole[key] for key in whole.keys() & (NEEDED | types.keys())}) == parsed(whole)


def test_other_names_of_keys_take_precedence():
    usual = {"tie_embedding": False, "block_ff_dim": 300, "full_attn_idxs": [1], "layer_types": None}
    found = parsed(settings_of("lfm2", **FOUR) | usual)
    assert (found.tied, found.intermediate_size) == (False, 256)
    assert [each is None for each in found.spec.recurrent] == [False, True, False, False]
    settings = settings_of("nemotron_h", layers_block_type=["full_attention"])
    del settings["layers_block_type"]
    found = parsed(settings | {"hybrid_override_pattern": "M-*E-", "mamba_d_conv": 3})
    assert (found.layers, found.spec.has_kv) == (5, [False, False, True, False, False])
    assert found.spec.recurrent[0] is not None
    assert found.spec.recurrent[0].width == 3


def limits_of(family: str, **changes: Any) -> tuple[float, float]:
    found = parsed(settings_of(family, **TYPES.get(family, {})) | changes).spec.recurrent[0]
    assert isinstance(found, MambaSpec)
    return found.limits


@pytest.mark.parametrize("family", ["granitemoehybrid", "nemotron_h"])
@pytest.mark.parametrize("limits", [[0, 1], [0.0, 1.0], [0, math.inf], [0, {"__float__": "Infinity"}]])
def test_limits_of_time_steps_may_be_whole_numbers(limits: list[Any], family: str):
    assert limits_of(family, time_step_limit=limits) == (0.0, 1.0 if limits[1] == 1 else math.inf)


def test_bounds_of_initial_time_steps_do_not_limit_those_of_nemotron_h():
    assert limits_of("nemotron_h", time_step_min=0.4, mamba_dt_min=0.4, time_step_floor=0.4) == (0.0, math.inf)
    assert limits_of("nemotron_h", mamba_dt_limit=[0.1, 0.5]) == (0.1, 0.5)


def test_granite_without_recurrent_layers_lacks_nothing_on_gpus():
    """Its small models have attention only."""
    settings = settings_of("granitemoehybrid", **TYPES["granitemoehybrid"]) | {"num_local_experts": 0}
    assert parsed(settings).spec.lacks == "recurrent layers"
    dense = parsed(settings | {"layer_types": ["attention"] * 32}).spec
    assert (dense.lacks, dense.state_size, dense.has_kv) == ("", 0, [True] * 32)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("lfm2", {"layer_types": ["conv"] * 4}, "layer_types must have attention in at least one layer"),
        ("lfm2", {"layer_types": ["sliding_attention"] * 4}, "layer_types 'sliding_attention' is not supported"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache must be a whole number from 2"),
        ("qwen3_5_text", {"linear_num_value_heads": 5}, r"\(5\) must be divisible by linear_num_key_heads \(16\)"),
        ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ("granitemoehybrid", {"mamba_n_heads": 7}, "mamba_n_heads .* do not divide the 8192 channels"),
        ("granitemoehybrid", {"time_step_limit": [2.0, 1.0]}, "time_step_limit must be two numbers"),
        ("granitemoehybrid", {"time_step_limit": 3}, "time_step_limit must be two numbers"),
        ("granitemoehybrid", {"time_step_limit": [True, 2]}, "time_step_limit must be two numbers"),
        ("granitemoehybrid", {"time_step_limit": [0.0, math.nan]}, "time_step_limit must be two numbers"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type 'alibi' is not supported"),
        ("nemotron_h", {"layers_block_type": ["mamba", "lstm"]}, "layers_block_type 'lstm' is not supported"),
        ("nemotron_h", {"layers_block_type": ["mamba", "mlp"]}, "must have attention in at least one layer"),
        ("nemotron_h", {"n_groups": 3}, r"mamba_num_heads \(128\) must be divisible by n_groups \(3\)"),
        ("nemotron_h", {"moe_latent_size": 9}, "moe_latent_size must be None"),
        ("nemotron_h", {"n_group": 3}, r"n_group \(3\) must divide 8 experts"),
    ],
)
def test_settings_that_are_not_supported_are_rejected_by_key(family: str, changes: dict[str, Any], message: str):
    types = {"layer_types": CONV, **FOUR} if family == "lfm2" else TYPES.get(family, {})
    with pytest.raises(CheckpointError, match=message):
        parsed(settings_of(family, **types) | changes)
