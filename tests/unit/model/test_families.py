"""Each family against `transformers` on the same random weights: the same greedy tokens, and the same logits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.model.harness import Variant, check_bfloat16, check_generate, check_logits

NEW = 32
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 33, 48, 64, 65, 90, 100, 127, 128, 150, 199, 256, 270, 300)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


def window(size: int) -> dict[str, Any]:
    return {"use_sliding_window": True, "sliding_window": size}


ALTERNATING = ["sliding_attention", "full_attention"]
VARIANTS: dict[str, Variant] = {
    "llama": Variant("llama", {}),
    "llama-all-heads": Variant("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-3, "hidden_act": "gelu"}),
    "llama-one-kv-head": Variant("llama", {"num_key_value_heads": 1, "head_dim": 20}),
    "llama-biases": Variant("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": Variant("llama", {"tie_word_embeddings": True}),
    "llama-theta": Variant("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama-linear": Variant("llama", rope(rope_type="linear", factor=3.0)),
    "llama-dynamic": Variant("llama", rope(rope_type="dynamic", factor=2.0)),
    "llama-llama3": Variant("llama", rope(rope_type="llama3", **LLAMA3)),
    "llama-yarn": Variant("llama", rope(**YARN)),
    "llama-yarn-mscale": Variant("llama", rope(**YARN, mscale=1.0, mscale_all_dim=0.6, truncate=False, beta_fast=16)),
    "llama-yarn-attention": Variant("llama", rope(**YARN, attention_factor=1.3, beta_slow=2)),
    "mistral": Variant("mistral", {"sliding_window": 24}),
    "mistral-window-1": Variant("mistral", {"sliding_window": 1}),
    "mistral-no-window": Variant("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": Variant("qwen2", {}),
    "qwen2-window": Variant("qwen2", {"max_window_layers": 1, **window(40)}),
    "qwen2-window-off": Variant("qwen2", {"use_sliding_window": False, "sliding_window": 40, "max_window_layers": 0}),
    "qwen3": Variant("qwen3", {"head_dim": 32}),
    "qwen3-biases": Variant("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-layer-types": Variant("qwen3", {"head_dim": 16, "layer_types": ALTERNATING, **window(30)}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(variant: str, tmp_path, seed: int):
    check_logits(VARIANTS[variant], tmp_path, LENGTHS, NEW, seed)


@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen2", "qwen3"])
def test_equals_generate(variant: str, tmp_path, seed: int):
    check_generate(VARIANTS[variant], tmp_path, (1, 16, 100), NEW, seed)


@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen2", "qwen3"])
def test_bfloat16_is_as_good_as_transformers(variant: str, tmp_path, seed: int):
    check_bfloat16(VARIANTS[variant], tmp_path, LENGTHS, NEW, seed)
