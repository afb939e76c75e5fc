"""The interpreter of `DecoderSpec`: token ids in, logits out.

Each layer adds the previous block's delta to the residual stream as part of its first norm, and returns the next delta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from baton.engine.batch import Batch, Injection, Listener
from baton.engine.kernels.base import Rotation, Scratch
from baton.engine.kernels.elementwise import mapped
from baton.engine.kernels.inference import inference
from baton.engine.kernels.torch_attention import SPAN, SteadyAttention
from baton.engine.kernels.torch_reference import PLAIN
from baton.engine.kv_cache import KVCache
from baton.engine.models import deepseek
from baton.engine.models.config import ModelConfig
from baton.engine.models.llama import Norm, Parts, SelfAttention, Step
from baton.engine.models.moe import feed_forward
from baton.engine.models.recurrent.layers import recurrent_layer
from baton.engine.models.rotary import Rotary
from baton.engine.models.spec import AttentionSpec, DecoderSpec, LayerInputs


class _Attend(Protocol):
    def __call__(self, x: Tensor, step: Step, keys: Tensor, values: Tensor) -> Tensor:
        """Return the delta of the residual stream."""


class _AnyLayer(Protocol):
    def __call__(self, x: Tensor, delta: Tensor | None, step: Step, keys: Tensor, values: Tensor) -> Tensor | None:
        """Return what the next layer adds to the residual stream."""


class Layer:
    """One layer: attention, then a feed-forward network, with norms before them."""

    def __init__(self, config: ModelConfig, parts: Parts, spec: AttentionSpec, index: int, name: str) -> None:
        names, hidden = config.spec.names, config.hidden_size
        self.scale = config.spec.residual_scale

        def norm(part: str) -> Norm | None:
            return parts.norm(f"{name}.{part}", hidden, config.spec.norm) if part else None

        self.input_norm = norm(names.before_attention)
        self.attention = attention_of(config, parts, name, spec, index)
        self.after_attention = norm(names.after_attention)
        self.post_norm = norm(names.before_mlp)
        self.feed_forward = feed_forward(config, parts, name, index)
        self.after_mlp = norm(names.after_mlp)

    def __call__(self, x: Tensor, delta: Tensor | None, step: Step, keys: Tensor, values: Tensor) -> Tensor:
        normed = step.scratch.take("normed", *x.shape)
        delta = self.attention(_before(self.input_norm, x, normed, delta), step, keys, values)
        delta = self._after(self.after_attention, delta, step)
        delta = self.feed_forward(_before(self.post_norm, x, normed, delta), step)
        return self._after(self.after_mlp, delta, step)

    def _after(self, norm: Norm | None, delta: Tensor, step: Step) -> Tensor:
        if norm is not None:
            delta = norm(delta, step.scratch.take("delta_normed", *delta.shape))
        return delta if self.scale == 1.0 else delta.mul_(self.scale)


class ParallelLayer(Layer):
    """One layer whose attention and feed-forward network both read the same rows."""

    def __call__(self, x: Tensor, delta: Tensor | None, step: Step, keys: Tensor, values: Tensor) -> Tensor:
        normed, take = step.scratch.take("normed", *x.shape), step.scratch.take
        rows = _before(self.input_norm, x, normed, delta)
        attended = take("attention_delta", *x.shape).copy_(self.attention(rows, step, keys, values))
        return self._after(None, self.feed_forward(rows, step).add_(attended), step)


class InputLayer:
    """One layer that adds its inputs of each token to its result, and has a factor."""

    def __init__(self, config: ModelConfig, parts: Parts, spec: AttentionSpec, index: int, name: str) -> None:
        assert config.spec.inputs is not None
        self.layer = Layer(config, parts, spec, index, name)
        width, hidden, self.index = config.spec.inputs.width, config.hidden_size, index
        self.factor = parts.weights.tensor(f"{name}.layer_scalar", 1)
        self.act = PLAIN[config.spec.mlp.activation]
        self.gate = parts.whole(f"{name}.per_layer_input_gate", width, hidden, bias=False) if width else None
        if width:
            self.project = parts.whole(f"{name}.per_layer_projection", hidden, width, bias=False)
            self.input_norm_after = parts.norm(f"{name}.post_per_layer_input_norm", hidden, config.spec.norm)

    def __call__(self, x: Tensor, delta: Tensor | None, step: Step, keys: Tensor, values: Tensor) -> Tensor | None:
        x.add_(self.layer(x, delta, step, keys, values))
        if self.gate is not None:
            assert step.inputs is not None
            take = step.scratch.take
            gate = self.gate(x, take("input_gate", x.shape[0], self.gate.width))
            gated = mapped(self.act, gate, fixed=step.fixed) * step.inputs[:, self.index]
            projected = self.project(gated, take("delta", *x.shape))
            x.add_(self.input_norm_after(projected, take("delta_normed", *x.shape)))
        x.mul_(self.factor)
        return None


class LayerEmbedding:
    """The inputs of all layers."""

    def __init__(self, config: ModelConfig, parts: Parts, inputs: LayerInputs, name: str) -> None:
        layers, hidden, norm = config.layers, config.hidden_size, f"{name}.per_layer_projection_norm"
        self.shape = layers, inputs.width
        self.embed = parts.weights.tensor(f"{name}.embed_tokens_per_layer.weight", inputs.vocab, layers * inputs.width)
        project = f"{name}.per_layer_model_projection"
        self.project = parts.whole(project, layers * inputs.width, hidden, bias=False)
        self.norm, self.factor = parts.norm(norm, inputs.width, config.spec.norm), hidden**-0.5
        self.scale = torch.tensor(inputs.width**0.5, dtype=parts.weights.dtype, device=parts.weights.device)

    def __call__(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """Return the inputs [N, layers, width] of tokens with the embeddings x [N, hidden]."""
        shape = (x.shape[0], *self.shape)
        projected = self.project(x, x.new_empty(x.shape[0], self.project.width)).mul_(self.factor).view(shape)
        of_tokens = (self.embed[token_ids] * self.scale).view(shape)
        return self.norm(projected, torch.empty_like(projected)).add_(of_tokens).mul_(2.0**-0.5)


def layer_kind(spec: DecoderSpec) -> Callable[[ModelConfig, Parts, AttentionSpec, int, str], _AnyLayer]:
    """Return the class of the layers of a family."""
    if spec.inputs:
        return InputLayer
    if spec.single:
        return SingleLayer
    return ParallelLayer if spec.parallel else Layer


class SingleLayer:
    """One layer with attention or a feed-forward network, not both, and a norm before it."""

    def __init__(self, config: ModelConfig, parts: Parts, spec: AttentionSpec, index: int, name: str) -> None:
        self.norm = parts.norm(f"{name}.{config.spec.names.before_attention}", config.hidden_size, config.spec.norm)
        mixes = config.spec.single[index] == "mixer"
        self.attention = attention_of(config, parts, name, spec, index) if mixes else None
        self.feed_forward = None if mixes else feed_forward(config, parts, name, index)

    def __call__(self, x: Tensor, delta: Tensor | None, step: Step, keys: Tensor, values: Tensor) -> Tensor:
        normed = self.norm(x, step.scratch.take("normed", *x.shape), delta)
        if self.feed_forward is not None:
            return self.feed_forward(normed, step)
        assert self.attention is not None
        return self.attention(normed, step, keys, values)


def _before(norm: Norm | None, x: Tensor, normed: Tensor, delta: Tensor | None) -> Tensor:
    """Add `delta` to x, and return the rows that a block reads."""
    if norm is not None:
        return norm(x, normed, delta)
    return x if delta is None else x.add_(delta)


def attention_of(config: ModelConfig, parts: Parts, layer: str, spec: AttentionSpec, index: int) -> _Attend:
    """Return the attention of layer `index`, or what it has in its place. `layer` is the name prefix of its tensors."""
    recurrent, name = config.spec.recurrent[index : index + 1], f"{layer}.{config.spec.names.attention}"
    if recurrent and recurrent[0] is not None:
        name = f"{layer}.{config.spec.names.recurrent}"
        return recurrent_layer(recurrent[0], parts, name, config.hidden_size, config.spec.state_offset(index))
    if config.latent is not None:
        return deepseek.LatentAttention(config, parts, config.latent, name)
    return SelfAttention(config, parts, name, spec)


class Decoder:
    """The whole model."""

    def __init__(self, config: ModelConfig, parts: Parts) -> None:
        self.config, self.kernels, weights = config, parts.kernels, parts.weights
        self.spec, names = config.spec, config.names_in(weights.checkpoint.__contains__)
        self.embed = weights.tensor(f"{names.embed}.weight", config.vocab_size, config.hidden_size)
        make = layer_kind(self.spec)
        layers = enumerate(self.spec.attention)
        scale = self.spec.embedding_scale
        self.embedding_scale = None if scale == 1.0 else torch.tensor(scale, dtype=weights.dtype, device=weights.device)
        self.layers = [make(config, parts, spec, index, f"{names.layers}.{index}") for index, spec in layers]
        self.norm = parts.norm(names.norm, config.hidden_size, self.spec.norm)
        # A head in a tied checkpoint takes precedence, as in transformers.
        tied = config.tied and f"{names.head}.weight" not in weights.checkpoint
        self.head = parts.head(self.embed, tied=tied, name=names.head, bias=self.spec.head.bias)
        # Latent attention rotates in float32.
        dtype, width = (torch.float32, 0) if config.latent else (weights.dtype, config.head_dim)
        width = 0 if any(each.head_dim for each in self.spec.attention) else width
        inputs, root = self.spec.inputs, names.embed.rpartition(".")[0]
        self.inputs = LayerEmbedding(config, parts, inputs, root) if inputs and inputs.width else None
        self.rotaries = [Rotary(rope, dtype, weights.device, width) for rope in self.spec.ropes]
        self.scratch = Scratch(weights.dtype, weights.device)
        self.replays = parts.replays(self.scratch)
        self._has_kv = self.spec.has_kv
        written = list(accumulate(self._has_kv, initial=0))
        self._places = [written[n if each.reads is None else each.reads] for n, each in enumerate(self.spec.attention)]
        self._by_reach = {spec.reach: spec for spec in self.spec.attention}
        self._temperature = next((spec.temperature for spec in self.spec.attention if spec.temperature), None)
        self.hidden: Tensor  # [L, hidden]: rows behind the last norm, in the order of `logit_rows`; valid like logits

    @inference
    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        """Write K and V to `kv`. Returns logits of `logit_rows`, float32 [L, vocab], valid until the next forward."""
        self.kernels.begin(batch)
        step = self.step_of(batch, kv.layout.block_size)
        x = self.scratch.take("x", batch.token_ids.shape[0], self.config.hidden_size)
        torch.index_select(self.embed, 0, batch.token_ids, out=x)
        if self.embedding_scale is not None:
            x.mul_(self.embedding_scale)
        if self.inputs is not None:
            step = replace(step, inputs=self.inputs(batch.token_ids, x))
        layers = partial(self._run_layers, x, step, batch, kv)
        if self.replays is None:
            logits = layers(batch.on_layer)
        else:
            logits = self.replays(batch, kv, step.attend.values(), layers)
        self.hidden = self._rows("normed", batch.logit_rows)
        return self._scaled(logits, fixed=batch.fixed)

    def _run_layers(self, x: Tensor, step: Step, batch: Batch, kv: KVCache, on_layer: Listener | None) -> Tensor:
        """Return the product of the head after all layers. `normed` of the scratch then has the rows behind the last
        norm. Changes x.
        """
        delta, written = None, 0
        for number, (layer, has_kv) in enumerate(zip(self.layers, self._has_kv, strict=True)):
            place = min(self._places[number], len(kv.of_layers) - 1)  # a recurrent layer uses neither K nor V
            delta = layer(x, delta, step, *kv.of_layers[place])
            if has_kv and on_layer is not None:  # sums of this layer prove that all ranks have written K and V
                on_layer(written)
            written += has_kv
            if batch.thinking is not None:
                self._exchange(batch.thinking, number + 1, x, delta)
        if self.replays is None or batch.logit_rows.shape[0] < x.shape[0]:
            x = x if delta is None else x.add_(delta)
            x, delta = torch.index_select(x, 0, batch.logit_rows, out=self._rows("last", batch.logit_rows)), None
        return self._product(self.norm(x, self._rows("normed", batch.logit_rows), delta))

    def _rows(self, name: str, rows: Tensor) -> Tensor:
        return self.scratch.take(name, rows.shape[0], self.config.hidden_size)

    def _exchange(self, thinking: Injection, number: int, x: Tensor, delta: Tensor | None) -> None:
        """Exchange states and hidden rows after layer `number`, counted from 1. The layer's output is x + delta."""
        assert self.config.thinking is not None
        if number == self.config.thinking.input_layer:
            x.add_(thinking.states)
        if number == self.config.thinking.output_layer and thinking.rows is not None:
            thinking.hidden = x[thinking.rows] if delta is None else x[thinking.rows] + delta[thinking.rows]

    def step_of(self, batch: Batch, block_size: int) -> Step:
        """Return the state that all layers share in a forward of this batch."""
        rotations = tuple(self._rotations(batch))
        if self.config.latent is not None:
            return deepseek.latent_step(self.config, self.kernels, batch, block_size, rotations, self.scratch)
        slots = batch.slot_mapping
        if self.replays is not None:  # records have the address
            slots = self.scratch.take("slots", 1, slots.shape[0], torch.int64)[0].copy_(slots)
        step = Step(rotations, slots, {}, self.scratch, fixed=batch.fixed, states=batch.states)
        for reach, spec in self._by_reach.items():
            if spec.in_kernels:
                step.attend[reach] = self.kernels.attention(batch, block_size, reach.window, spec.scale)
            else:
                span = None if batch.fixed else SPAN
                step.special[reach] = SteadyAttention(
                    batch, block_size, reach.window, spec.scale, span=span, chunk=reach.chunk, soft_cap=spec.soft_cap
                )
        if self._temperature is None:
            return step
        return replace(step, temperatures=self._warm(batch.positions, fixed=batch.fixed))

    def _rotations(self, batch: Batch) -> Iterator[Rotation]:
        for number, rotary in enumerate(self.rotaries):
            if self.scratch.device.type == "cpu":
                yield rotary.looked_up(batch.positions, self.scratch, number)
            else:
                yield rotary(batch.positions, fixed=batch.fixed)

    def _warm(self, positions: Tensor, *, fixed: bool) -> Tensor:
        """Return the factors of queries at these positions: [N, 1, 1]."""
        assert self._temperature is not None
        scale, floor, offset = self._temperature
        steps = torch.floor((positions[:, None, None].float() + offset) / floor)
        return (mapped(torch.log1p, steps, fixed=fixed) * scale + 1).to(self.scratch.dtype)

    def logits_of(self, normed: Tensor, *, fixed: bool) -> Tensor:
        """Return the logits of rows [L, hidden] behind a last norm: float32 [L, vocab], valid until the next ones."""
        return self._scaled(self._product(normed), fixed=fixed)

    def _product(self, normed: Tensor) -> Tensor:
        return self.head(normed, self.scratch.take("logits", normed.shape[0], self.head.width, torch.float32))

    def _scaled(self, logits: Tensor, *, fixed: bool) -> Tensor:
        head = self.spec.head
        if head.scale != 1.0:
            logits.mul_(head.scale)
        if head.soft_cap is not None:
            logits = mapped(torch.tanh_, logits.div_(head.soft_cap), fixed=fixed).mul_(head.soft_cap)
        return logits


class PredictionHead:
    """The first layer for multi-token prediction of a DeepSeek-V3 checkpoint (arXiv 2412.19437, section 2.2).

        x_i = eh_proj([enorm(embed(t_(i+1))), hnorm(h_i)])      h_i: the row behind the last norm
        h'_i = shared_head.norm(layer(x_i))                     logits of t_(i+2): head(h'_i)

    Embedding and head are those of the model. Its copies of them in the checkpoint are not read.
    """

    def __init__(self, model: Decoder, parts: Parts) -> None:
        config, name = model.config, head_prefix(model.config)
        hidden, norm, experts = config.hidden_size, config.spec.norm, config.spec.experts
        self.model = model
        if experts is not None:  # of this layer alone
            sparse = f"{name}{config.spec.names.mlp}.{config.spec.names.router}.weight" in parts.weights.checkpoint
            config = replace(config, spec=replace(config.spec, experts=replace(experts, sparse=(sparse,))))
        self.enorm, self.hnorm = (parts.norm(f"{name}{part}", hidden, norm) for part in ("enorm", "hnorm"))
        self.projection = parts.whole(f"{name}eh_proj", hidden, 2 * hidden, bias=False)
        self.layer = Layer(config, parts, config.spec.attention[-1], 0, name.removesuffix("."))
        self.norm = parts.norm(f"{name}shared_head.norm", hidden, norm)

    @torch.inference_mode()
    def forward(self, batch: Batch, hidden: Tensor, kv: KVCache) -> tuple[Tensor, Tensor]:
        """Compute rows of tokens t_(i+1) and `hidden` h_i [N, hidden]. Write the one layer of `kv`. Return logits,
        float32 [L, vocab], and h' [L, hidden] of `logit_rows`. The next forward of model or head overwrites both.
        """
        model, size = self.model, (batch.token_ids.shape[0], self.model.config.hidden_size)
        model.kernels.begin(batch)
        take, step = model.scratch.take, model.step_of(batch, kv.layout.block_size)
        x = torch.index_select(model.embed, 0, batch.token_ids, out=take("x", *size))
        pair = self.enorm(x, take("normed", *size)), self.hnorm(hidden, take("hidden_normed", *size))
        x = self.projection(torch.cat(pair, dim=1), x)
        x.add_(self.layer(x, None, step, *kv.of_layers[0]))
        last = x[batch.logit_rows]
        normed = self.norm(last, take("normed", *last.shape))
        return model.logits_of(normed, fixed=batch.fixed), normed


def head_prefix(config: ModelConfig) -> str:
    """Return the name prefix of the head's tensors."""
    return f"{config.spec.names.layers}.{config.layers}."
