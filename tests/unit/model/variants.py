"""Kinds of models, each with random weights: dense, with experts, and with latent attention."""

from pathlib import Path
from typing import Any, NamedTuple

from tests.unit.model.checkpoints import random_checkpoint


class Variant(NamedTuple):
    """A kind of model. `seed`: of weights without near ties in routing, see `assert_sure`."""

    family: str
    settings: dict[str, Any]
    seed: int = 0

    def write(self, folder: Path, **more: Any) -> Any:
        return random_checkpoint(folder, self.family, seed=self.seed, **self.settings, **more)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ALTERNATING = ["sliding_attention", "full_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


def window(size: int) -> dict[str, Any]:
    return {"use_sliding_window": True, "sliding_window": size}


DENSE: dict[str, Variant] = {
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

QWEN: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
MIXTRAL = {"num_local_experts": 6, "num_experts_per_tok": 2}

SPARSE: dict[str, Variant] = {
    "mixtral": Variant("mixtral", MIXTRAL),
    "mixtral-window": Variant("mixtral", MIXTRAL | {"sliding_window": 24, "num_experts_per_tok": 1}),
    "mixtral-all": Variant("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "head_dim": 16}),
    "qwen3_moe": Variant("qwen3_moe", QWEN | {"norm_topk_prob": True}, 4),
    "qwen3_moe-plain": Variant("qwen3_moe", QWEN | {"attention_bias": True, "tie_word_embeddings": True}, 2),
    "qwen3_moe-step": Variant("qwen3_moe", QWEN | {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
    "qwen3_moe-mlp-only": Variant("qwen3_moe", QWEN | {"mlp_only_layers": [1], "num_hidden_layers": 3}, 1),
    "qwen3_moe-window": Variant("qwen3_moe", QWEN | {"use_sliding_window": True, "sliding_window": 30}, 3),
    "qwen3_moe-many": Variant(
        "qwen3_moe", QWEN | {"num_experts": 48, "num_experts_per_tok": 2, "norm_topk_prob": True}, 1
    ),
}

SHAPE = {"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16}
SHAPE |= {"num_hidden_layers": 3, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3}
SHAPE |= {"first_k_dense_replace": 1}
LITE = SHAPE | {"q_lora_rank": None}
V2 = SHAPE | {"q_lora_rank": 20, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
V3 = SHAPE | {"q_lora_rank": 20, "n_group": 4, "topk_group": 2}
LATENT_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
V2_YARN = {**LATENT_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}
V3_YARN = {**LATENT_YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16}

LATENT: dict[str, Variant] = {
    "v2-lite": Variant("deepseek_v2", LITE, 3),
    "v2-lite-yarn": Variant("deepseek_v2", LITE | {"rope_parameters": V2_YARN, "n_shared_experts": 1}, 1),
    "v2": Variant("deepseek_v2", V2 | {"routed_scaling_factor": 1.5}, 1),
    "v2-biases": Variant(
        "deepseek_v2", V2 | {"attention_bias": True, "mlp_bias": True, "first_k_dense_replace": 0}, 10
    ),
    "v2-eps": Variant("deepseek_v2", LITE | {"rms_norm_eps": 0.1, "num_hidden_layers": 2, "hidden_act": "gelu"}),
    "v3": Variant("deepseek_v3", V3),
    "v3-many-groups": Variant("deepseek_v3", V3 | {"n_routed_experts": 24, "n_group": 8, "topk_group": 3}, 1),
    "v3-plain": Variant(
        "deepseek_v3",
        V3 | {"norm_topk_prob": False, "rope_interleave": False, "q_lora_rank": None, "kv_lora_rank": 24},
        1,
    ),
    "v3-one-group": Variant("deepseek_v3", V3 | {"n_group": 1, "topk_group": 1, "attention_bias": True}, 2),
    "v3-yarn": Variant("deepseek_v3", V3 | {"rope_parameters": V3_YARN}),
    "v3-dense": Variant("deepseek_v3", V3 | {"first_k_dense_replace": 3, "tie_word_embeddings": True}),
}
