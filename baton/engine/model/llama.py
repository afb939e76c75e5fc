"""The Llama architecture, and those that differ from it by a switch: Mistral, Qwen2 and Qwen3.

    x = embed(tokens)
    for each layer:   x += attention(norm(x))     rotary positions, grouped queries; Qwen3 norms each q and k head
                      x += mlp(norm(x))           down(act(gate(x)) * up(x))
    logits = head(norm(x))

Mistral looks back over a sliding window, Qwen2 has biases on q, k and v. One row per token throughout, whichever
sequence it belongs to: only attention knows sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import embedding

from baton.engine.model.attention import PagedAttention
from baton.engine.model.layers import ACTIVATIONS, Linear
from baton.engine.model.rope import Rotary, rotate

if TYPE_CHECKING:
    from torch import Tensor

    from baton.engine.batch import Batch
    from baton.engine.kv import KVCache
    from baton.engine.model.attention import Attention
    from baton.engine.model.config import ModelConfig
    from baton.engine.model.layers import Weights


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers share in one forward: the rotation of each row, where its K and V go, what it may see."""

    cos: Tensor
    sin: Tensor
    slots: Tensor
    attend: dict[int | None, Attention]  # by window


class SelfAttention:
    """Projects, rotates, writes K and V to the cache, attends, projects back."""

    def __init__(self, config: ModelConfig, weights: Weights, name: str, window: int | None) -> None:
        self.window = window
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        names = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        self.qkv = weights.linear(names, (q, kv, kv), config.hidden_size, bias=config.qkv_bias)
        self.o = weights.linear((f"{name}.o_proj",), (config.hidden_size,), q, bias=config.o_bias)
        self.q_norm, self.k_norm = (
            (weights.norm(f"{name}.{part}_norm", config.head_dim, config.norm_eps) if config.qk_norm else None)
            for part in ("q", "k")
        )

    def __call__(self, x: Tensor, step: Step, keys: Tensor, values: Tensor) -> Tensor:
        qkv = self.qkv(x).view(len(x), -1, self.head_dim)
        q, k, v = qkv.tensor_split((self.heads, self.heads + self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, step.cos, step.sin), rotate(k, step.cos, step.sin)
        keys.flatten(0, 1).index_put_((step.slots,), k)
        values.flatten(0, 1).index_put_((step.slots,), v)
        return self.o(step.attend[self.window](q, keys, values))


class MLP:
    """The gated feed-forward network."""

    def __init__(self, config: ModelConfig, weights: Weights, name: str) -> None:
        inner = config.intermediate_size
        names = (f"{name}.gate_proj", f"{name}.up_proj")
        self.gate_up = weights.linear(names, (inner, inner), config.hidden_size, bias=config.mlp_bias)
        self.down = weights.linear((f"{name}.down_proj",), (config.hidden_size,), inner, bias=config.mlp_bias)
        self.act = ACTIVATIONS[config.activation]

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


class Layer:
    """One pre-norm block."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        name = f"model.layers.{index}"
        self.input_norm = weights.norm(f"{name}.input_layernorm", config.hidden_size, config.norm_eps)
        self.attention = SelfAttention(config, weights, f"{name}.self_attn", config.windows[index])
        self.post_norm = weights.norm(f"{name}.post_attention_layernorm", config.hidden_size, config.norm_eps)
        self.mlp = MLP(config, weights, f"{name}.mlp")


class Llama:
    """Token ids in, logits out."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.embed = weights.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [Layer(config, weights, index) for index in range(config.layers)]
        self.norm = weights.norm("model.norm", config.hidden_size, config.norm_eps)
        # A tied checkpoint that carries a head all the same means it: transformers then does not tie either.
        tied = config.tied and "lm_head.weight" not in weights.checkpoint
        head = ("lm_head",), (config.vocab_size,), config.hidden_size
        self.head = Linear(self.embed) if tied else weights.linear(*head, bias=False)
        self.rotary = Rotary(config.rope, weights.dtype, weights.device)

    @torch.no_grad()
    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        """Logits of the batch's `logit_rows`, float32 [L, vocab]; K and V of all N tokens are in `kv` afterwards."""
        block_size = kv.layout.block_size
        attend: dict[int | None, Attention] = {
            window: PagedAttention(batch, block_size, window) for window in set(self.config.windows)
        }
        step = Step(*self.rotary(batch.positions), batch.slot_mapping, attend)
        x = embedding(batch.token_ids, self.embed)
        for layer, keys, values in zip(self.layers, kv.k, kv.v, strict=True):
            x = x + layer.attention(layer.input_norm(x), step, keys, values)
            x = x + layer.mlp(layer.post_norm(x))
        return self.head(self.norm(x[batch.logit_rows])).float()
