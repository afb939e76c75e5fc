"""Each family against `transformers` on the same random weights: the same greedy tokens, and the same logits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from baton.engine.model.build import load_model
from tests.unit.model.checkpoints import VOCAB, random_checkpoint, reload
from tests.unit.model.harness import assert_bfloat16_as_good, assert_equals, greedy

NEW = 32
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 33, 48, 64, 65, 90, 100, 127, 128, 150, 199, 256, 270, 300)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-all-heads": ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-3, "hidden_act": "gelu"}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "head_dim": 20}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama-linear": ("llama", rope(rope_type="linear", factor=3.0)),
    "llama-dynamic": ("llama", rope(rope_type="dynamic", factor=2.0)),
    "llama-llama3": ("llama", rope(rope_type="llama3", **LLAMA3)),
    "llama-yarn": ("llama", rope(**YARN)),
    "llama-yarn-mscale": ("llama", rope(**YARN, mscale=1.0, mscale_all_dim=0.6, truncate=False, beta_fast=16)),
    "llama-yarn-attention": ("llama", rope(**YARN, attention_factor=1.3, beta_slow=2)),
    "mistral": ("mistral", {"sliding_window": 24}),
    "mistral-window-1": ("mistral", {"sliding_window": 1}),
    "mistral-no-window": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
    "qwen2-window-off": ("qwen2", {"use_sliding_window": False, "sliding_window": 40, "max_window_layers": 0}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-biases": ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 30,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(variant: str, tmp_path, seed: int):
    family, settings = VARIANTS[variant]
    oracle = random_checkpoint(tmp_path, family, **settings)
    assert_equals(oracle, load_model(tmp_path), prompts(), NEW, random.Random(seed))


@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen2", "qwen3"])
def test_equals_generate(variant: str, tmp_path, seed: int):
    """The same with transformers' own cached decoding."""
    family, settings = VARIANTS[variant]
    oracle = random_checkpoint(tmp_path, family, **settings)
    some = [prompts()[i] for i in (0, 5, 12)]
    rows = greedy(load_model(tmp_path), some, NEW, random.Random(seed))
    for prompt, row in zip(some, rows, strict=True):
        expected = oracle.generate(
            torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones(1, len(prompt))
        )
        assert row.tokens == expected[0].tolist()


@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen2", "qwen3"])
def test_bfloat16_is_as_good_as_transformers(variant: str, tmp_path, seed: int):
    family, settings = VARIANTS[variant]
    random_checkpoint(tmp_path, family, dtype=torch.bfloat16, **settings)
    oracle, exact = reload(tmp_path, family, torch.bfloat16), reload(tmp_path, family, torch.float32)
    assert_bfloat16_as_good(oracle, exact, load_model(tmp_path), prompts(), NEW, random.Random(seed))
