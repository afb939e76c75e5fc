"""Random checkpoints of all kinds of models: dense, with experts, with latent attention, and models that think.

The reference of a model that thinks is transformers' layers in a dense loop.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file

transformers.utils.logging.disable_progress_bar()

HIDDEN, HEADS, KV_HEADS, VOCAB, POSITIONS = 48, 4, 2, 199, 512
# Names of classes, because each import of one takes a tenth of a second.
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "arcee": "ArceeForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "apertus": "ApertusForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phi": "PhiForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "bamba": "BambaForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
}


def class_of(family: str) -> Any:
    return getattr(transformers, CLASSES[family])


def random_checkpoint(
    folder: Path, family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, shard: str = "1GB", **settings: Any
) -> Any:
    """Write a tiny checkpoint of `family` to `folder` and return its transformers model, in eval mode.

    The weights are so large that attention, positions and biases decide the tokens. A wrong rotation would not change
    the tokens of a model with the usual initial values.
    """
    shape: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": 80, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": POSITIONS}
    shape |= {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model_class = class_of(family)
    config = model_class.config_class(**(shape | settings))
    config._attn_implementation = "eager"
    model = limited(model_class(config).eval().requires_grad_(False))
    randomise(model, seed)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return model


def limited(model: Any) -> Any:
    """Return a model whose time steps of Mamba have the limits of its config, as Nemotron-H's authors have them.
    transformers 5.23 takes `time_step_min`, a bound of initial values, for the lower one (its pull request 48989).
    """
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(model.config.time_step_limit)
    return model


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
LLAMA4_VISION = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
QWEN35_TEXT = {"model_type": "qwen3_5_text", "full_attention_interval": 2, "linear_num_key_heads": 2}
QWEN35_TEXT |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
QWEN35_VISION = {"depth": 1, "num_heads": 2, "out_hidden_size": HIDDEN}
GEMMA4_TEXT = {"model_type": "gemma4_text", "global_head_dim": 32, "sliding_window": 20, "num_kv_shared_layers": 2}
GEMMA4_TEXT |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 8}
GEMMA4_TEXT |= {"vocab_size_per_layer_input": VOCAB, "pad_token_id": 0}
GEMMA4_VISION = {"head_dim": 16, "num_key_value_heads": 2}
# The class, the settings of its text model, and those of its vision model.
WRAPPED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3", {"model_type": "gemma3_text", "sliding_window": 20}, {}),
    "gemma4": ("Gemma4", GEMMA4_TEXT, GEMMA4_VISION),
    "mistral3": ("Mistral3", {"model_type": "mistral", "sliding_window": None}, {"model_type": "pixtral"}),
    "qwen3_5": ("Qwen3_5", QWEN35_TEXT, QWEN35_VISION),
    "llama4": ("Llama4", {"model_type": "llama4_text", "num_local_experts": 4, "head_dim": 16}, LLAMA4_VISION),
}


def wrapped_checkpoint(folder: Path, family: str) -> Any:
    """Write a tiny checkpoint of a model for text and images, and return its transformers model, in eval mode."""
    name, text, vision = WRAPPED[family]
    shape: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": 80, "num_hidden_layers": 4, "head_dim": 16}
    shape |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": POSITIONS}
    shape |= {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = getattr(transformers, f"{name}Config")(text_config=shape | text, vision_config=VISION | vision)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval().requires_grad_(False)
    randomise(model, 0)
    model.save_pretrained(folder)
    return model


def reload(folder: Path, family: str, dtype: torch.dtype) -> Any:
    """Load the checkpoint with transformers. `model.to` would round the rotary frequencies as well."""
    model = class_of(family).from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return limited(model.eval().requires_grad_(False))


def parameter_of(reference: Any, name: str) -> torch.Tensor:
    """Return a parameter of transformers by its name in a file. Those of experts are rows of stacked ones."""
    if ".experts." not in name:
        found: torch.Tensor = reference.get_parameter(name)
        return found
    layer, number, product = re.sub("block_sparse_moe", "mlp", name).removesuffix(".weight").rsplit(".", 2)
    if product in ("w2", "down_proj"):
        found = reference.get_parameter(f"{layer}.down_proj")[int(number)]
        return found
    gate, up = reference.get_parameter(f"{layer}.gate_up_proj")[int(number)].chunk(2)
    return gate if product in ("w1", "gate_proj") else up


def randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight") or "layernorm" in name:
            parameter.copy_(1 + 0.3 * noise)
        elif parameter.dim() == 1:
            parameter.copy_(0.5 * noise)
        else:
            parameter.copy_(noise * (0.5 if "embed" in name else 1.5 / parameter.shape[-1] ** 0.5))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
        if name.endswith("layer_scalar"):
            buffer.copy_(1 + 0.2 * torch.randn(buffer.shape, generator=generator))


def edit_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; `...` deletes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


class Variant(NamedTuple):
    """A kind of model. `seed`: of weights without near ties in routing, see `assert_sure` in test_families.py."""

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
V32 = V3 | {"index_topk": 12, "index_n_heads": 16, "index_head_dim": 16}
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
    "v32": Variant("deepseek_v32", V32),
    "v32-yarn": Variant("deepseek_v32", V32 | {"rope_parameters": V3_YARN, "index_topk": 40, "attention_bias": True}),
    "v32-dense": Variant("deepseek_v32", V32 | {"first_k_dense_replace": 3, "index_head_dim": 8}),
}

FOUR: dict[str, Any] = {"num_hidden_layers": 4}
LONG_FACTORS = {"short_factor": [1.0, 1.3, 2.0], "long_factor": [9.0] * 3}
SMALL_GLM: dict[str, Any] = {"num_hidden_layers": 3, "moe_intermediate_size": 24, "n_routed_experts": 8, "head_dim": 16}
GPT_OSS_YARN = {**YARN, "rope_theta": 10000.0, "truncate": False}
LLAMA4: dict[str, Any] = {**FOUR, "intermediate_size": 24, "intermediate_size_mlp": 40, "head_dim": 16}
LLAMA4 |= {"num_local_experts": 4, "attention_chunk_size": 24, "floor_scale": 16}

GEMMA4: dict[str, Any] = {**FOUR, "head_dim": 16, "global_head_dim": 32, "sliding_window": 24}
GEMMA4 |= {"layer_types": ALTERNATING * 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 259}
GEMMA4 |= {"final_logit_softcapping": 3.0}

NATIVE: dict[str, Variant] = {
    "granite": Variant(
        "granite",
        {
            "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 4.0,
            "attention_bias": True, "mlp_bias": True,
        },
    ),
    "smollm3": Variant("smollm3", {"no_rope_layer_interval": 2}),
    "smollm3-window": Variant("smollm3", {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 20}),
    "seed_oss": Variant("seed_oss", {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}),
    "arcee": Variant("arcee", {"mlp_bias": True, "head_dim": 12}),
    "ernie4_5": Variant("ernie4_5", {"head_dim": 16, "use_bias": True}),
    "hunyuan": Variant("hunyuan_v1_dense", {"attention_bias": True, "head_dim": 16}),
    "hunyuan-alpha": Variant("hunyuan_v1_dense", {"head_dim": 16, **rope(rope_type="dynamic", factor=1.0, alpha=9.0)}),
    "ministral": Variant("ministral", {"layer_types": ALTERNATING, "sliding_window": 24, "head_dim": 16}),
    "ministral3": Variant("ministral3", {"head_dim": 16, **rope(**YARN, llama_4_scaling_beta=0.4)}),
    "apertus": Variant("apertus", {"attention_bias": True, **rope(rope_type="llama3", **LLAMA3)}),
    "gemma2": Variant("gemma2", {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 20}),
    "gemma2-caps": Variant(
        "gemma2",
        {"head_dim": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "attention_bias": True},
    ),
    "gemma3": Variant("gemma3_text", {**FOUR, "head_dim": 16, "sliding_window": 24, "sliding_window_pattern": 3}),
    "gemma3-types": Variant(
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 20, "layer_types": ALTERNATING, "final_logit_softcapping": 3.0},
    ),
    "gemma4": Variant("gemma4_text", GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "gemma4-same": Variant(
        "gemma4_text",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
    ),
    "phi3": Variant("phi3", {"sliding_window": 24}),
    "phi3-longrope": Variant(
        "phi3",
        {
            "num_attention_heads": 6, **rope(rope_type="longrope", **LONG_FACTORS, partial_rotary_factor=0.75),
            "original_max_position_embeddings": 400, "tie_word_embeddings": True,
        },
    ),
    "phi": Variant("phi", {"qk_layernorm": True, "num_attention_heads": 6}),
    "starcoder2": Variant("starcoder2", {"sliding_window": 24}),
    "starcoder2-no-bias": Variant("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "nemotron": Variant("nemotron", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "stablelm": Variant("stablelm", {"use_qkv_bias": True, "num_attention_heads": 6}),
    "stablelm-parallel": Variant("stablelm", {"use_parallel_residual": True, "num_attention_heads": 6}),
    "olmo2": Variant("olmo2", {"attention_bias": True}),
    "olmo3": Variant("olmo3", {**FOUR, "sliding_window": 24}),
    "exaone4": Variant("exaone4", {**FOUR, "sliding_window": 24, "sliding_window_pattern": 2}),
    "exaone4-full": Variant("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "cohere": Variant("cohere", {"use_qk_norm": True, "attention_bias": True, "logit_scale": 0.3}),
    "cohere2": Variant("cohere2", {**FOUR, "sliding_window": 24, "head_dim": 16}),
    "glm4": Variant("glm4", {"head_dim": 16}),
    "glm4-no-bias": Variant("glm4", {"head_dim": 16, "attention_bias": False, "partial_rotary_factor": 0.75}),
    "glm4_moe": Variant("glm4_moe", SMALL_GLM | {"num_experts_per_tok": 3, "use_qk_norm": True, "n_group": 2}),
    "minimax_m2": Variant(
        "minimax_m2", {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8}
    ),
    "gpt_oss": Variant(
        "gpt_oss",
        {
            "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 24,
            "swiglu_limit": 1.5, "rope_parameters": GPT_OSS_YARN,
        },
    ),
    "llama4": Variant("llama4_text", LLAMA4 | {"interleave_moe_layer_step": 2}),
    "llama4-two": Variant(
        "llama4_text", LLAMA4 | {"num_experts_per_tok": 2, "use_qk_norm": False, "no_rope_layer_interval": 2}
    ),
}  # fmt: skip

CONV = ["conv", "full_attention", "conv", "conv"]
LFM2: dict[str, Any] = {**FOUR, "layer_types": CONV, "block_multiple_of": 16}
LFM2_MOE = {**FOUR, "layer_types": CONV, "num_dense_layers": 1, "num_experts": 8, "num_experts_per_tok": 2}
LFM2_MOE |= {"moe_intermediate_size": 24}

DELTA: dict[str, Any] = {**FOUR, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
DELTA |= {"linear_value_head_dim": 12, "head_dim": 16, "layer_types": None, "full_attention_interval": 2}
QWEN3_NEXT = DELTA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN3_NEXT |= {"shared_expert_intermediate_size": 20}

MAMBA: dict[str, Any] = {"mamba_n_heads": 6, "mamba_d_state": 10, "mamba_n_groups": 2, "embedding_multiplier": 3.0}
MAMBA |= {"residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 4.0, "attention_bias": True}
MAMBA |= {"shared_intermediate_size": 40, "layer_types": ["linear_attention", "full_attention"] * 2}

NEMOTRON_H: dict[str, Any] = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "n_groups": 2}
NEMOTRON_H |= {"mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 10, "head_dim": 12}

RECURRENT: dict[str, Variant] = {
    "bamba": Variant(
        "bamba",
        {
            **FOUR,
            "attn_layer_indices": [2],
            "mamba_n_heads": 6,
            "mamba_d_state": 10,
            "mamba_n_groups": 3,
            "num_attention_heads": 6,
            "mlp_bias": True,
            "attention_bias": True,
        },
    ),
    "nemotron_h": Variant("nemotron_h", NEMOTRON_H),
    "nemotron_h-experts": Variant(
        "nemotron_h",
        NEMOTRON_H
        | {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 4,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 20,
            "routed_scaling_factor": 2.5,
        },
    ),
    "nemotron_h-biases": Variant(
        "nemotron_h",
        NEMOTRON_H
        | {
            "use_bias": True,
            "mlp_bias": True,
            "use_conv_bias": False,
            "time_step_limit": (0.4, 0.9),
            "n_groups": 3,
        },
    ),
    "granite-hybrid": Variant("granitemoehybrid", {**FOUR, **MAMBA, "num_local_experts": 0}),
    "granite-hybrid-rope": Variant(
        "granitemoehybrid",
        {
            **FOUR,
            **MAMBA,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "time_step_limit": (0.3, 0.9),
            "tie_word_embeddings": True,
        },
    ),
    "granite-hybrid-experts": Variant(
        "granitemoehybrid", {**FOUR, **MAMBA, "num_local_experts": 4, "intermediate_size": 24}
    ),
    "qwen3_next": Variant("qwen3_next", QWEN3_NEXT | {"num_hidden_layers": 2}),
    "qwen3_next-dense": Variant(
        "qwen3_next",
        QWEN3_NEXT | {"mlp_only_layers": [0, 1, 2, 3], "attention_bias": True, "linear_num_value_heads": 2},
    ),
    "qwen3_5_moe": Variant("qwen3_5_moe_text", QWEN3_NEXT | {"num_hidden_layers": 2}),
    "qwen3_5": Variant("qwen3_5_text", DELTA | {"partial_rotary_factor": 0.5, "linear_conv_kernel_dim": 3}),
    "lfm2": Variant("lfm2", LFM2 | {"block_ffn_dim_multiplier": 1.5}),
    "lfm2-biases": Variant("lfm2", LFM2 | {"conv_bias": True, "conv_L_cache": 5, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": Variant("lfm2_moe", LFM2_MOE),
    "lfm2_moe-plain": Variant("lfm2_moe", LFM2_MOE | {"use_expert_bias": False, "norm_topk_prob": False}, 1),
}


LAYERS = 4
SETTINGS: dict[str, int] = {"chunk_size": 4, "input_layer": 1, "output_layer": 3, "max_thought_tokens": 3}
SETTINGS |= {"bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 7}
_BLOCKS = {LAYERS: "thinking.block", LAYERS + 1: "compression.block"}


class Answer(NamedTuple):
    """Tokens, and thoughts without end tokens."""

    tokens: list[int]
    thoughts: list[tuple[int, ...]]


@dataclass(frozen=True)
class Reference:
    """The reference model. `model` has two layers more than the backbone: T and C. It uses none of Baton's code."""

    model: Any
    settings: dict[str, int]
    norm: torch.Tensor
    head: torch.Tensor

    @torch.inference_mode()
    def answer(self, prompt: list[int], new: int, *, thinks: bool = True, while_decoding: bool = False) -> Answer:
        """Answer greedily, strictly one chunk after the other, without a cache."""
        tokens, thoughts, size = list(prompt), list[tuple[int, ...]](), self.settings["chunk_size"]
        while len(tokens) < len(prompt) + new:
            known = len(tokens) if while_decoding else len(prompt)
            while thinks and (len(thoughts) + 1) * size <= known:
                hidden = self._forward(tokens[: (len(thoughts) + 1) * size], thoughts)[1]
                thoughts.append(self._think(hidden[-size:]))
            tokens.append(int(self._forward(tokens, thoughts)[0][-1].argmax()))
        return Answer(tokens[len(prompt) :], thoughts)

    def _forward(self, tokens: list[int], thoughts: list[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits and the hidden rows."""
        size, settings = self.settings["chunk_size"], self.settings
        chunks = -(-len(tokens) // size)
        made = [self._compress(thoughts[i] if i < len(thoughts) else ()) for i in range(chunks - 1)]
        states = torch.cat([torch.zeros(size, HIDDEN), *made])[: len(tokens)]
        x, hidden = self._embed(tokens), torch.empty(0)
        for number in range(1, LAYERS + 1):
            x = self._layer(number - 1, x)
            if number == settings["input_layer"]:
                x = x + states
            if number == settings["output_layer"]:
                hidden = x[0]
        return self.model.lm_head(self.model.model.norm(x))[0], hidden

    def _think(self, hidden: torch.Tensor) -> tuple[int, ...]:
        thought: list[int] = []
        while len(thought) < self.settings["max_thought_tokens"]:
            written = self._embed([self.settings["bos_token_id"], *thought])
            last = self._layer(LAYERS, torch.cat((hidden[None], written), 1))[0, -1]
            last = self.norm * last * torch.rsqrt(last.pow(2).mean() + self.model.config.rms_norm_eps)
            token = int((self.head @ last).argmax())
            if token == self.settings["eos_token_id"]:
                break
            thought.append(token)
        return tuple(thought)

    def _compress(self, thought: tuple[int, ...]) -> torch.Tensor:
        size = self.settings["chunk_size"]
        ended = [*thought, self.settings["eos_token_id"]][: self.settings["max_thought_tokens"]]
        padded = ended + [self.settings["pad_token_id"]] * (size - len(ended))
        return self._layer(LAYERS + 1, self._embed(padded))[0, -size:]

    def _embed(self, tokens: list[int]) -> torch.Tensor:
        return self.model.model.embed_tokens(torch.tensor([tokens]))

    def _layer(self, number: int, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        positions = torch.arange(length)[None]
        window = getattr(self.model.config, "sliding_window", None) if number < LAYERS else None
        back = torch.arange(length)[:, None] - torch.arange(length)
        seen = (back >= 0) & (back < (window or length))
        mask = torch.zeros(1, 1, length, length).masked_fill_(~seen, -torch.inf)
        trunk = self.model.model
        rotation = trunk.rotary_emb(x, positions)
        return trunk.layers[number](x, attention_mask=mask, position_ids=positions, position_embeddings=rotation)


def thinking_checkpoint(folder: Path, family: str = "llama", *, eos: float = 12.0, **changed: Any) -> Reference:
    """Write a tiny checkpoint that thinks. `eos`: 12 gives half of the chunks no thought, 0 gives each a thought."""
    settings = SETTINGS | {name: changed.pop(name) for name in list(changed) if name in SETTINGS}
    model = random_checkpoint(folder, family, num_hidden_layers=LAYERS + 2, **changed)
    tensors = {_renamed(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(VOCAB, HIDDEN, generator=generator) * HIDDEN**-0.5
    head[settings["eos_token_id"]] *= eos  # above or below all others, by the sign of the input
    norm = 1 + 0.3 * torch.randn(HIDDEN, generator=generator)
    tensors |= {"thinking.norm.weight": norm, "thinking.lm_head.weight": head}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, num_hidden_layers=LAYERS, thinking=settings)
    if "layer_types" in (config := json.loads((folder / "config.json").read_text())):
        edit_config(folder, layer_types=config["layer_types"][:LAYERS])
    return Reference(model, settings, norm, head)


def _renamed(name: str) -> str:
    for number, block in _BLOCKS.items():
        name = name.replace(f"model.layers.{number}.", f"{block}.")
    return name
