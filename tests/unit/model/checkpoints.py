"""Random-weight checkpoints, written by `transformers` itself, and the model that wrote them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

transformers.utils.logging.disable_progress_bar()

HIDDEN, HEADS, KV_HEADS, VOCAB, POSITIONS = 48, 4, 2, 199, 512
CLASSES = {
    "llama": transformers.LlamaForCausalLM,
    "mistral": transformers.MistralForCausalLM,
    "qwen2": transformers.Qwen2ForCausalLM,
    "qwen3": transformers.Qwen3ForCausalLM,
    "mixtral": transformers.MixtralForCausalLM,
    "qwen3_moe": transformers.Qwen3MoeForCausalLM,
    "deepseek_v2": transformers.DeepseekV2ForCausalLM,
    "deepseek_v3": transformers.DeepseekV3ForCausalLM,
}


def random_checkpoint(
    folder: Path, family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, shard: str = "1GB", **settings: Any
) -> Any:
    """Write a tiny checkpoint of `family` to `folder` and return its transformers model, in eval mode.

    The weights are so large that attention, positions and biases decide the tokens. A wrong rotation would not change
    the tokens of a model with the usual initial values.
    """
    shape: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": 80, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": POSITIONS}
    shape |= {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None}
    model_class = CLASSES[family]
    config = model_class.config_class(**(shape | settings))
    config._attn_implementation = "eager"
    model = model_class(config).eval().requires_grad_(False)
    randomise(model, seed)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return model


def reload(folder: Path, family: str, dtype: torch.dtype) -> Any:
    """Load the checkpoint with transformers. `model.to` would round the rotary frequencies as well."""
    model = CLASSES[family].from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval().requires_grad_(False)


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


def edit_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; `...` deletes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
