"""A plain Llama-shaped decoder for training, with Hugging Face's parameter names.

Shapes in this file: B rows, T positions, D hidden, H heads, K key/value heads, E = D / H.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. The field names are those of ``config.json``."""

    vocab_size: int = 2048
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


class Norm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., D]."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotation(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine tables, each [T, E], in the half-split layout of Hugging Face."""
    size = shape.hidden_size // shape.num_attention_heads
    frequency = shape.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to [B, heads, T, E]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-high, low), dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.size = hidden // shape.num_attention_heads
        narrow = self.size * shape.num_key_value_heads
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, narrow, bias=False)
        self.v_proj = nn.Linear(hidden, narrow, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]. Padding is on the right, so the causal mask alone hides it."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return cast(Tensor, self.o_proj(mixed.transpose(1, 2).flatten(2)))


class Mlp(nn.Module):
    """Gated feed-forward (SwiGLU)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        return cast(Tensor, self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class Trunk(nn.Module):
    """Embedding, layers and last norm: Hugging Face's ``model.`` parameters."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)


def initialise(model: nn.Module, shape: Shape) -> None:
    """Fill the matrices in place with random values, equal for equal seeds."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            # Projections that write into the residual stream start smaller, as their sum grows with depth.
            shrink = (
                (2 * shape.num_hidden_layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            )
            nn.init.normal_(parameter, std=shrink * (0.02 if "embed" in name else parameter.shape[1] ** -0.5))


class DemoModel(nn.Module):
    """The whole model. The output head shares the embedding matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        initialise(self, shape)

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids [B, T] to the last hidden states [B, T, D]."""
        cos, sin = rotation(self.shape, ids.shape[1])
        x: Tensor = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return cast(Tensor, self.model.norm(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [..., D] to [..., vocabulary]."""
        return functional.linear(hidden, self.model.embed_tokens.weight)


def config(shape: Shape, end: int) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(shape),
        "head_dim": shape.hidden_size // shape.num_attention_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": end,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "float32",
    }


def save(model: DemoModel, folder: Path, end: int) -> None:
    """Write weights, ``config.json`` and ``generation_config.json`` in the Hugging Face layout."""
    write(model, folder, config(model.shape, end))


def write(model: nn.Module, folder: Path, content: dict[str, Any]) -> None:
    """Write a model's weights, `content` as ``config.json``, and the matching ``generation_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().float().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # only the owner can read a file that safetensors creates
    generation = {name: content[name] for name in ("eos_token_id", "pad_token_id")} | {"do_sample": False}
    for name, value in [("config.json", content), ("generation_config.json", generation)]:
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DemoModel:
    """Read a checkpoint written by ``save``."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = DemoModel(Shape(**{name: content[name] for name in asdict(Shape())}))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.to(dtype).eval()
