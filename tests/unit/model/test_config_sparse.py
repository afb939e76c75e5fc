"""The meaning of config.json for mixtures of experts and latent attention: defaults, and errors by name."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

from baton.engine.models.config import ModelConfig
from baton.engine.models.config_variants import ExpertsConfig, LatentConfig
from baton.errors import CheckpointError
from tests.unit.model.test_config import VALUES, parsed

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")
V2 = {"num_experts_per_tok": 2}  # it has no default
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
    assert (config.rope.theta, config.norm_eps) == (theirs.rope_parameters["rope_theta"], theirs.rms_norm_eps)
    assert (config.max_positions, config.kv_heads) == (theirs.max_position_embeddings, theirs.num_key_value_heads)
    assert (config.head_dim, config.qk_norm) == (8, family == "qwen3_moe")


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
    assert (config.rope.head_dim, config.max_positions) == (theirs.qk_rope_head_dim, theirs.max_position_embeddings)


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
    assert config.rope.softmax_factor == pytest.approx(yarn_apply_mscale(rope, 1.0), rel=1e-12)


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
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid' for this model, got 'softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method must be 'noaux_tc' for this model, got 'greedy'"),
        ("deepseek_v3", {"n_group": 7}, r"n_group \(7\) must divide the number of experts \(256\)"),
        ("deepseek_v3", {"topk_group": 9}, r"topk_group \(9\) must be at most n_group \(8\)"),
        ("deepseek_v3", {"n_routed_experts": 8}, r"num_experts_per_tok \(8\) must be at most the 4 eligible experts"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even for rotary embeddings, got 7"),
        ("deepseek_v3", {"num_key_value_heads": 2}, r"num_key_value_heads must be num_attention_heads \(8\)"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, r"quantization_config \(fp8\)"),
    ],
)
def test_refused(family: str, settings: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        parsed(family, **settings)


def test_queries_at_once_or_by_way_of_a_narrow_row():
    assert latent("deepseek_v2", q_lora_rank=None).query_rank is None
    assert latent("deepseek_v2").query_rank == 1536
    assert latent("deepseek_v2", rope_interleave=False).interleaved  # V2 has only the interleaved form
    assert not latent("deepseek_v3", rope_interleave=False).interleaved


KEYS = (
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group"),
    *("n_routed_experts", "n_shared_experts", "first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step"),
    *("topk_method", "scoring_func", "moe_layer_freq", "routed_scaling_factor", "norm_topk_prob", "q_lora_rank"),
    *("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_nextn_predict_layers"),
)


@given(st.sampled_from(FAMILIES), st.dictionaries(st.sampled_from(KEYS), VALUES | st.integers(1, 9), max_size=4))
def test_any_json_is_parsed_or_refused(family: str, settings: dict[str, Any]):
    try:
        config: ModelConfig = parsed(family, **V2 | settings)
    except CheckpointError:
        return
    assert config.experts is not None
    assert config.experts.per_token <= config.experts.count
