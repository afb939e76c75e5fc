"""The Llama architecture and its close relatives Mistral, Qwen2 and Qwen3, and the parts shared by all models.

    x = embed(tokens)
    for each layer:   x += attention(norm(x))     rotary positions, grouped queries; Qwen3 norms each q and k head
                      x += mlp(norm(x))           down(act(gate(x)) * up(x))
    logits = head(norm(x))

Mistral has a sliding window, Qwen2 has biases on q, k and v. Activations have one row per token; only attention
distinguishes sequences. `Weights` supplies each tensor and checks its name and shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.batch import Batch, Injection
from baton.engine.kernels.base import Attention, HeadNorms, Kernels, Linear, Rotation, Scratch
from baton.engine.kernels.quantized import SCHEMES, Quantize, QuantizedWeight, quantize
from baton.engine.kv_cache import KVCache
from baton.engine.models.checkpoint import Weights
from baton.engine.models.config import ACTIVATIONS, ModelConfig
from baton.engine.models.rope import Rotary


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """State that all layers share in one forward: the rotation of each row, its KV slot, and attention by window."""

    rotation: Rotation
    slots: Tensor
    attend: dict[int | None, Attention]  # key: window
    scratch: Scratch
    over_rows: bool = False  # `attend` reads K and V of this forward's rows instead of the cache
    fixed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A factory for the parts of a model, from its weights and kernels."""

    weights: Weights
    kernels: Kernels
    quantize: Quantize = field(default="none", kw_only=True)

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        return RMSNorm(self.kernels, self.weights.tensor(f"{name}.weight", size), eps)

    def linear(self, names: tuple[str, ...], outs: tuple[int, ...], n_in: int, *, bias: bool) -> Linear:
        """Return several projections of one input as one layer, with outputs in the order of `names`."""
        extra = self.weights.joined(tuple(f"{name}.bias" for name in names), outs) if bias else None
        if self.are_stored(names):
            return self._read(names, outs, n_in, extra)
        return self.layer(self.columns(names, outs, n_in), extra)

    def are_stored(self, names: tuple[str, ...]) -> bool:
        """Return whether the weights of all these layers are stored quantised and can stay packed as one."""
        return self.weights.checkpoint.scheme([f"{name}.weight" for name in names]) is not None

    def _read(self, names: tuple[str, ...], outs: tuple[int, ...], n_in: int, bias: Tensor | None) -> Linear:
        return self.kernels.quantized(self._packed(names, outs, n_in), bias, self.weights.keep)

    def _packed(self, names: tuple[str, ...], outs: tuple[int, ...], n_in: int) -> QuantizedWeight:
        weights = [f"{name}.weight" for name in names]
        return self.weights.checkpoint.packed(weights, outs, n_in, self.weights.dtype)

    def layer(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return the product with a weight [width, K], quantised if the model is."""
        if self.quantize == "none":
            return self.kernels.linear(weight, bias)
        return self.kernels.quantized(quantize(weight, SCHEMES[self.quantize]), bias, self.weights.keep)

    def columns(self, names: tuple[str, ...], outs: tuple[int, ...], n_in: int) -> Tensor:
        """Return the weight [sum(outs), n_in] of `linear`, widened if it is stored quantised. A tensor-parallel rank
        holds its share of the rows.
        """
        return self.weights.joined(tuple(f"{name}.weight" for name in names), outs, n_in)

    def whole(self, name: str, out: int, n_in: int, *, bias: bool) -> Linear:
        """Return a projection that every rank computes whole, because it is small and all ranks need its results."""
        extra = self.weights.tensor(f"{name}.bias", out) if bias else None
        if self.are_stored((name,)):
            return self._read((name,), (out,), n_in, extra)
        return self.kernels.linear(self.weights.tensor(f"{name}.weight", out, n_in), extra)

    def summed(self, name: str, out: int, n_in: int, *, bias: bool) -> Linear:
        """Return a projection to the residual stream. Tensor-parallel ranks divide its inputs and sum the results."""
        return self.linear((name,), (out,), n_in, bias=bias)

    def head(self, embed: Tensor, *, tied: bool) -> Linear:
        if not tied and self.are_stored(("lm_head",)):
            return self._read(("lm_head",), (len(embed),), embed.shape[1], None)
        return self.layer(embed if tied else self.weights.tensor("lm_head.weight", *embed.shape))


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """Root mean square norm over the last dimension."""

    kernels: Kernels
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor, out: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta`, unless it is None, to x in place, and write the norm of x to `out`."""
        return self.kernels.rms_norm(x, delta, self.weight, self.eps, out)


class SelfAttention:
    """Self-attention: project, rotate, write K and V to the cache, attend, project back."""

    def __init__(self, config: ModelConfig, parts: Parts, name: str, window: int | None) -> None:
        self.window, self.kernels, self.head_dim = window, parts.kernels, config.head_dim
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        names = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        self.qkv = parts.linear(names, (q, kv, kv), config.hidden_size, bias=config.qkv_bias)
        self.o = parts.summed(f"{name}.o_proj", config.hidden_size, q, bias=config.o_bias)
        self.norms: HeadNorms | None = None
        if config.qk_norm:
            query, key = (parts.weights.tensor(f"{name}.{part}_norm.weight", config.head_dim) for part in ("q", "k"))
            self.norms = HeadNorms(query, key, config.norm_eps)

    def __call__(self, x: Tensor, step: Step, keys: Tensor, values: Tensor) -> Tensor:
        rows, take = len(x), step.scratch.take
        qkv = self.qkv(x, take("qkv", rows, self.qkv.width)).view(rows, -1, self.head_dim)
        query = self.kernels.rotate_and_store(qkv, step.rotation, self.norms, step.slots, keys, values)
        attended = take("attended", rows, query.shape[1] * self.head_dim)
        return self.o(step.attend[self.window](query, keys, values, attended), take("delta", rows, self.o.width))


class MLP:
    """The gated feed-forward network."""

    def __init__(self, config: ModelConfig, parts: Parts, name: str, inner: int) -> None:
        names = (f"{name}.gate_proj", f"{name}.up_proj")
        self.gate_up = parts.linear(names, (inner, inner), config.hidden_size, bias=config.mlp_bias)
        self.down = parts.summed(f"{name}.down_proj", config.hidden_size, inner, bias=config.mlp_bias)
        self.kernels, self.activation = parts.kernels, ACTIVATIONS[config.activation]

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        rows, take = len(x), step.scratch.take
        both, gated = take("gate_up", rows, self.gate_up.width), take("gated", rows, self.gate_up.width // 2)
        self.kernels.gated(self.gate_up, x, self.activation, both, gated)
        return self.down(gated, take("delta", rows, self.down.width))


class Variant(NamedTuple):
    """The layer factories in which an architecture differs from Llama. `attention` takes (config, parts, name prefix,
    window), `feed_forward` (config, parts, name prefix, layer index).
    """

    attention: Callable[[ModelConfig, Parts, str, int | None], Callable[[Tensor, Step, Tensor, Tensor], Tensor]]
    feed_forward: Callable[[ModelConfig, Parts, str, int], Callable[[Tensor, Step], Tensor]]


class Layer:
    """One pre-norm block. It adds the previous block's delta to the residual stream and returns the next delta."""

    def __init__(self, config: ModelConfig, parts: Parts, variant: Variant, index: int, name: str = "") -> None:
        name = name or f"model.layers.{index}"
        self.input_norm = parts.norm(f"{name}.input_layernorm", config.hidden_size, config.norm_eps)
        self.attention = variant.attention(config, parts, f"{name}.self_attn", config.windows[index])
        self.post_norm = parts.norm(f"{name}.post_attention_layernorm", config.hidden_size, config.norm_eps)
        self.feed_forward = variant.feed_forward(config, parts, name, index)

    def __call__(self, x: Tensor, delta: Tensor | None, step: Step, keys: Tensor, values: Tensor) -> Tensor:
        normed = step.scratch.take("normed", *x.shape)
        delta = self.attention(self.input_norm(x, normed, delta), step, keys, values)
        return self.feed_forward(self.post_norm(x, normed, delta), step)


class Llama:
    """The whole model: token ids in, logits out."""

    def __init__(self, config: ModelConfig, parts: Parts, variant: Variant) -> None:
        self.config, self.kernels, weights = config, parts.kernels, parts.weights
        self.embed = weights.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [Layer(config, parts, variant, index) for index in range(config.layers)]
        self.norm = parts.norm("model.norm", config.hidden_size, config.norm_eps)
        # A head in a tied checkpoint takes precedence, as in transformers.
        tied = config.tied and "lm_head.weight" not in weights.checkpoint
        self.head = parts.head(self.embed, tied=tied)
        self.rotary = Rotary(config.rope, weights.dtype, weights.device)
        self.scratch = Scratch(weights.dtype, weights.device)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        """Write K and V to `kv`. Returns logits of `logit_rows`, float32 [L, vocab], valid until the next forward."""
        self.kernels.begin(batch)
        step = self._step(batch, kv.layout.block_size)
        x = self.scratch.take("x", len(batch.token_ids), self.config.hidden_size)
        torch.index_select(self.embed, 0, batch.token_ids, out=x)
        delta = None
        for number, (layer, keys, values) in enumerate(zip(self.layers, kv.k, kv.v, strict=True)):
            delta = layer(x, delta, step, keys, values)
            if batch.on_layer is not None:  # the sums of this layer prove that all ranks have written their K and V
                batch.on_layer(number)
            if batch.thinking is not None:
                self._exchange(batch.thinking, number + 1, x, delta)
        return self._logits(x if delta is None else x.add_(delta), batch.logit_rows)

    def _exchange(self, thinking: Injection, number: int, x: Tensor, delta: Tensor) -> None:
        """Exchange states and hidden rows after layer `number`, counted from 1. The layer's output is x + delta."""
        assert self.config.thinking is not None
        if number == self.config.thinking.input_layer:
            x.add_(thinking.states)
        if number == self.config.thinking.output_layer and thinking.rows is not None:
            thinking.hidden = x[thinking.rows] + delta[thinking.rows]

    def _step(self, batch: Batch, block_size: int) -> Step:
        scale, windows = self.config.head_dim**-0.5, set(self.config.windows)
        attend = {window: self.kernels.attention(batch, block_size, window, scale) for window in windows}
        return Step(self.rotary(batch.positions), batch.slot_mapping, attend, self.scratch, fixed=batch.fixed)

    def _logits(self, x: Tensor, rows: Tensor) -> Tensor:
        last = torch.index_select(x, 0, rows, out=self.scratch.take("last", len(rows), x.shape[1]))
        normed = self.norm(last, self.scratch.take("normed", *last.shape))
        return self.head(normed, self.scratch.take("logits", len(rows), self.head.width, torch.float32))
