"""The building blocks of decoders: weights by name (`Parts`), norms, self-attention and feed-forward networks.

Activations have one row per token; only attention distinguishes sequences. `Weights` supplies each tensor and checks
its name and shape. Rotations other than (i, i + head_dim / 2) become this one by another order of the rows of the
projections, which leaves q . k as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.engine.batch import StateRows
from baton.engine.kernels.base import Attention, HeadNorms, Kernels, Linear, Rotation, Scratch
from baton.engine.kernels.cpu.ops import CpuKernels
from baton.engine.kernels.cpu.replay import Replays
from baton.engine.kernels.elementwise import mapped
from baton.engine.kernels.quantized import SCHEMES, Quantize, QuantizedWeight, quantize
from baton.engine.kernels.torch_attention import SteadyAttention
from baton.engine.kernels.torch_reference import PLAIN, rotate
from baton.engine.models.checkpoint import Weights
from baton.engine.models.config import ModelConfig
from baton.engine.models.recurrent.spec import Part, rows_of, whole
from baton.engine.models.rotary import row_order
from baton.engine.models.spec import AttentionSpec, HeadNormSpec, NormSpec, Reach


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """State that all layers share in one forward: rotations of each row, its KV slot, and attention by reach."""

    rotations: tuple[Rotation, ...]
    slots: Tensor
    attend: dict[Reach, Attention]
    scratch: Scratch
    over_rows: bool = False  # `attend` reads K and V of this forward's rows instead of the cache
    fixed: bool = False
    sensitive: bool = False  # as in `Batch`
    special: dict[Reach, SteadyAttention] = field(default_factory=dict)  # for layers that kernels cannot compute
    temperatures: Tensor | None = None  # factors of queries [N, 1, 1]
    states: StateRows | None = None  # set if the model has recurrent layers
    inputs: Tensor | None = None  # of each layer, [N, layers, width]


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A factory for the parts of a model, from its weights and kernels."""

    weights: Weights
    kernels: Kernels
    quantize: Quantize = field(default="none", kw_only=True)

    def norm(self, name: str, size: int, spec: NormSpec) -> Norm:
        if spec.in_kernels:
            return RMSNorm(self.kernels, self.weights.tensor(f"{name}.weight", size), spec.eps)
        return TorchNorm.read(self.weights, name, (size,), spec)

    def linear(
        self, names: tuple[str, ...], outs: tuple[int, ...], n_in: int, *, bias: bool, order: Tensor | None = None
    ) -> Linear:
        """Return several projections of one input as one layer. Its outputs are in the order of `names`, and then in
        `order`, int64 [sum(outs)]. One name may stand for all `outs`.
        """
        extra = None
        if bias:
            extra = self.ordered(self.weights.joined(tuple(f"{name}.bias" for name in names), outs), order)
        if self.are_stored(names):
            packed = self._packed(names, outs, n_in)
            packed = packed if order is None else packed.rows(order)
            return self.kernels.quantized(packed, extra, self.weights.keep)
        return self.layer(self.ordered(self.columns(names, outs, n_in), order), extra)

    def picked(
        self,
        names: Sequence[str],
        rows: Sequence[Sequence[Part]],
        n_in: int,
        *,
        bias: bool,
        order: Tensor | None = None,
    ) -> Linear:
        """Return this rank's `rows` of several projections of one input as one layer. `rows` has the parts of each
        tensor, after those of the only one are put in `order`, int64 [all its rows].
        """
        weights, size = self.weights, self.weights.size
        wholes, own = [whole(each, size) for each in rows], [rows_of(each, weights.rank, size) for each in rows]
        own = own if order is None else [order[own[0]]]
        extra = weights.picked([f"{name}.bias" for name in names], wholes, own) if bias else None
        if self.are_stored(tuple(names)):
            starts = accumulate(wholes, initial=0)
            every = torch.cat([start + each for start, each in zip(starts, own, strict=False)])
            packed = Parts._packed(self, tuple(names), tuple(wholes), n_in).rows(every)
            return self.kernels.quantized(packed, extra, weights.keep)
        return self.layer(weights.picked([f"{name}.weight" for name in names], wholes, own, n_in), extra)

    def ordered(self, weight: Tensor, order: Tensor | None) -> Tensor:
        """Return the weight with its rows in this order, in the same memory."""
        if order is None:
            return weight
        self.weights.settle()
        return weight.copy_(weight[order.to(weight.device)])

    def are_stored(self, names: tuple[str, ...]) -> bool:
        """Return whether the weights of all these layers are stored quantised and can stay packed as one."""
        return self.weights.checkpoint.scheme([f"{name}.weight" for name in names]) is not None

    def _read(self, names: tuple[str, ...], outs: tuple[int, ...], n_in: int, bias: Tensor | None) -> Linear:
        packed = Parts._packed(self, names, outs, n_in)  # all rows, also on a rank
        return self.kernels.quantized(packed, bias, self.weights.keep)

    def _packed(self, names: tuple[str, ...], outs: tuple[int, ...], n_in: int) -> QuantizedWeight:
        weights = [f"{name}.weight" for name in names]
        rows = outs if len(names) == len(outs) else (sum(outs),)
        return self.weights.checkpoint.packed(weights, rows, n_in, self.weights.dtype)

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

    def replays(self, scratch: Scratch) -> Replays | None:
        """Return the replays for layers of these parts with this scratch, or None if nothing can be replayed."""
        return Replays(self.kernels, scratch) if isinstance(self.kernels, CpuKernels) else None

    def total(self, x: Tensor) -> Tensor:
        """Sum x [N, hidden] over tensor-parallel ranks, in place."""
        return x

    def shared_mean(self, means: Tensor, copies: int) -> Tensor:
        """Return the mean of `means` [N, 1, 1] over the `copies` ranks that share a group of heads."""
        return means

    def width_norm(self, norm: TorchNorm) -> Norm:
        """Return a norm over all heads of queries or keys, of which ranks hold some."""
        return norm

    def head(self, embed: Tensor, *, tied: bool, name: str = "lm_head", bias: bool = False) -> Linear:
        extra = self.weights.tensor(f"{name}.bias", len(embed)) if bias else None
        if not tied and self.are_stored((name,)):
            return self._read((name,), (len(embed),), embed.shape[1], extra)
        return self.layer(embed if tied else self.weights.tensor(f"{name}.weight", *embed.shape), extra)


class Norm(Protocol):
    """A norm over the last dimension."""

    def __call__(self, x: Tensor, out: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta`, unless it is None, to x in place, and write the norm of x to `out`."""


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """Root mean square norm by kernels."""

    kernels: Kernels
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor, out: Tensor, delta: Tensor | None = None) -> Tensor:
        return self.kernels.rms_norm(x, delta, self.weight, self.eps, out)


@dataclass(frozen=True, slots=True, eq=False)
class TorchNorm:
    """Any norm, by torch in float32."""

    kind: str
    weight: Tensor
    bias: Tensor | None
    eps: float

    @classmethod
    def read(
        cls, weights: Weights, name: str, shape: tuple[int, ...], spec: NormSpec, *, of_heads: bool = False
    ) -> TorchNorm:
        read = weights.float32_rows if of_heads else weights.float32
        weight = read(f"{name}.weight", *shape)
        bias = read(f"{name}.bias", *shape) if spec.bias else None
        if spec.plus_one:
            weights.settle()
            weight += 1
        return cls(spec.kind, weight, bias, spec.eps)

    def __call__(self, x: Tensor, out: Tensor, delta: Tensor | None = None) -> Tensor:
        if delta is not None:
            x.add_(delta)
        wide, size = x.float(), (x.shape[-1],)
        if self.kind == "layer":
            normed = F.layer_norm(wide, size, None, None, self.eps)
        else:
            normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        normed = normed * self.weight
        return out.copy_(normed if self.bias is None else normed + self.bias)


class SelfAttention:
    """Self-attention: project, rotate, write K and V to the cache, attend, project back."""

    def __init__(self, config: ModelConfig, parts: Parts, name: str, spec: AttentionSpec) -> None:
        head_dim, kv_heads = spec.head_dim or config.head_dim, spec.kv_heads or config.kv_heads
        config = replace(config, head_dim=head_dim, kv_heads=kv_heads)
        self.kernels, self.head_dim, names = parts.kernels, config.head_dim, config.spec.names
        self.kv_heads = config.kv_heads
        self.reach, self.rope, self.heads = spec.reach, spec.rope, config.heads
        self.warms = spec.temperature is not None
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        rotated = spec.head_dim or config.spec.rotated
        in_head = row_order(config.head_dim, rotated, interleaved=config.spec.interleaved)
        order = None if in_head is None else _in_all_heads(in_head, config.heads + config.kv_heads, q + 2 * kv)
        self.gates = q if spec.gated else 0
        outs = (q, kv, kv)
        if spec.gated:  # the rows of the gate follow those of the query in each head
            outs, order = (2 * q, kv, kv), _gates_last(config.heads, q, kv, order)
        inputs = (*names.qkv[:2], names.qkv[1]) if spec.keys_are_values else names.qkv
        self.reads = spec.reads is not None
        self.qkv = parts.linear(
            tuple(f"{name}.{part}" for part in inputs)[: 1 if self.reads else 3],
            outs[:1] if self.reads else outs,
            config.hidden_size,
            bias=spec.qkv_bias,
            order=order,
        )
        self.o = parts.summed(f"{name}.{names.o}", config.hidden_size, q, bias=spec.o_bias)
        eps = spec.head_norm.norm.eps if spec.head_norm else 0.0
        self.value_norm = (
            TorchNorm("rms", torch.ones(self.head_dim, device=parts.weights.device), None, eps)
            if spec.value_norm
            else None
        )
        if self.reads:
            assert spec.head_norm is not None
            self.query_norm = parts.norm(f"{name}.{names.q_norm}", self.head_dim, spec.head_norm.norm)
        else:
            self.norms, self.prepare = _head_norms(config, parts, name, spec.head_norm, in_head)
        self.sinks = parts.weights.float32_rows(f"{name}.sinks", config.heads) if spec.sinks else None
        self.in_kernels = spec.in_kernels

    def __call__(self, x: Tensor, step: Step, keys: Tensor, values: Tensor) -> Tensor:
        rows, take = x.shape[0], step.scratch.take
        projected, width = self.qkv(x, take("qkv", rows, self.qkv.width)), self.qkv.width - self.gates
        if self.gates:
            gates, projected = projected[:, width:], take("ungated", rows, width).copy_(projected[:, :width])
        qkv = projected.view(rows, -1, self.head_dim)
        keys, values = self._own(keys), self._own(values)
        query = self._query(qkv, step) if self.reads else self._stored(qkv, step, keys, values)
        if self.warms and step.temperatures is not None:
            query.mul_(step.temperatures)
        attended = take("attended", rows, query.shape[1] * self.head_dim)
        if self.in_kernels:
            step.attend[self.reach](query, keys, values, attended)
        else:
            step.special[self.reach](query, keys, values, attended, self.sinks)
        if self.gates:
            attended.mul_(mapped(torch.sigmoid, gates, fixed=step.fixed))
        return self.o(attended, take("delta", rows, self.o.width))

    def _own(self, cache: Tensor) -> Tensor:
        """Return the part of rows of a cache [blocks, block_size, heads, dim] that the layer uses: the first numbers of
        each head's equal share of a row, so that a range of heads is at the same place on any number of ranks.
        """
        if cache.shape[2:] == (self.kv_heads, self.head_dim) or cache.dtype is torch.int8:
            return cache
        share = cache.shape[2] * cache.shape[3] // self.kv_heads
        return cache.flatten(2).view(*cache.shape[:2], self.kv_heads, share)[..., : self.head_dim]

    def _query(self, qkv: Tensor, step: Step) -> Tensor:
        """Return the queries of a layer that reads the keys and values of another one."""
        query = self.query_norm(qkv, torch.empty_like(qkv))
        return query.copy_(rotate(query, step.rotations[self.rope]))

    def _stored(self, qkv: Tensor, step: Step, keys: Tensor, values: Tensor) -> Tensor:
        rotation = step.rotations[self.rope]
        if self.value_norm is not None:
            value = qkv[:, -self.kv_heads :]
            value.copy_(self.value_norm(value, torch.empty_like(value)))
        if self.prepare is not None:
            rotation = self.prepare(qkv, rotation)
        return self.kernels.rotate_and_store(qkv, rotation, self.norms, step.slots, keys, values)


def _in_all_heads(in_head: Tensor, heads: int, rows: int) -> Tensor:
    """Return the order of all rows if those of the first heads, of queries and keys, have the order `in_head`."""
    every = torch.arange(rows)
    ordered = every[: heads * len(in_head)].view(heads, -1)[:, in_head]
    return torch.cat((ordered.flatten(), every[heads * len(in_head) :]))


def _gates_last(heads: int, q: int, kv: int, order: Tensor | None) -> Tensor:
    """Return the order of rows in which queries, keys and values are in `order`, and gates follow them."""
    queries, gates = torch.arange(2 * q).view(heads, 2, -1).unbind(1)
    first = torch.cat((queries.flatten(), torch.arange(2 * q, 2 * (q + kv))))
    return torch.cat((first if order is None else first[order], gates.flatten()))


Prepare = Callable[[Tensor, Rotation], Rotation]


def _head_norms(
    config: ModelConfig, parts: Parts, name: str, spec: HeadNormSpec | None, in_head: Tensor | None
) -> tuple[HeadNorms | None, Prepare | None]:
    """Return the norms that kernels apply, or the function that applies others before `rotate_and_store`."""
    if spec is None:
        return None, None
    weights, dim, counts = parts.weights, config.head_dim, (config.heads, config.kv_heads)
    if spec.over == "bare":
        ones = torch.ones(dim, dtype=weights.dtype, device=weights.device)
        return HeadNorms(ones, ones, spec.norm.eps), None
    paths = [f"{name}.{part}" for part in (config.spec.names.q_norm, config.spec.names.k_norm)]
    if spec.in_kernels:
        query, key = (parts.ordered(weights.tensor(f"{path}.weight", dim), in_head) for path in paths)
        return HeadNorms(query, key, spec.norm.eps), None
    shapes: dict[str, list[tuple[int, ...]]] = {
        "head": [(dim,)] * 2,
        "heads": [(n, dim) for n in counts],
        "width": [(n * dim,) for n in counts],
    }
    norms = [
        TorchNorm.read(weights, path, shape, spec.norm, of_heads=spec.over != "head")
        for path, shape in zip(paths, shapes[spec.over], strict=True)
    ]
    if in_head is not None:
        weights.settle()
        norms = [_reordered(norm, in_head) for norm in norms]
    whole = spec.over == "width"
    both = [parts.width_norm(norm) if whole else norm for norm in norms]
    return None, _Prepare(both[0], both[1], config.heads, config.kv_heads, whole, spec.after)


def _reordered(norm: TorchNorm, in_head: Tensor) -> TorchNorm:
    weight, bias = (
        None if part is None else part.view(-1, len(in_head))[:, in_head.to(part.device)].view(part.shape)
        for part in (norm.weight, norm.bias)
    )
    assert weight is not None
    return replace(norm, weight=weight, bias=bias)


@dataclass(frozen=True, slots=True, eq=False)
class _Prepare:
    """Norms of queries and keys that kernels lack, in place. After the rotation, they leave none for the kernels."""

    query: Norm
    key: Norm
    heads: int
    kv_heads: int
    whole: bool
    after: bool

    def __call__(self, qkv: Tensor, rotation: Rotation) -> Rotation:
        query, key = qkv[:, : self.heads], qkv[:, self.heads : self.heads + self.kv_heads]
        if self.after:
            query.copy_(rotate(query, rotation))
            key.copy_(rotate(key, rotation))
            rotation = Rotation(torch.ones_like(rotation.cos), torch.zeros_like(rotation.sin))
        for norm, part in ((self.query, query), (self.key, key)):
            rows = part.flatten(1) if self.whole else part
            part.copy_(norm(rows, torch.empty_like(rows)).view(part.shape))
        return rotation


class MLP:
    """The feed-forward network: gated, or plain."""

    def __init__(self, config: ModelConfig, parts: Parts, name: str, inner: int) -> None:
        spec, names = config.spec.mlp, config.spec.names
        self.outs = 2 if spec.gated else 1
        paths = tuple(f"{name}.{part}" for part in names.up)
        self.up = parts.linear(paths, (inner,) * self.outs, config.hidden_size, bias=spec.bias)
        self.down = parts.summed(f"{name}.{names.down}", config.hidden_size, inner, bias=spec.bias)
        self.kernels, self.activation = parts.kernels, spec.activation
        self.plain = None if spec.gated else _plain(parts, name, spec.activation)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        rows, take = x.shape[0], step.scratch.take
        both, inner = take("gate_up", rows, self.up.width), self.up.width // self.outs
        if self.plain is not None:
            active = mapped(self.plain, self.up(x, both), fixed=step.fixed)
            return self.down(active, take("delta", rows, self.down.width))
        gated = take("gated", rows, inner)
        self.kernels.gated(self.up, x, self.activation, both, gated)
        return self.down(gated, take("delta", rows, self.down.width))


def _plain(parts: Parts, name: str, activation: str) -> Callable[[Tensor], Tensor]:
    """Return the activation of a network that is not gated."""
    if activation != "xielu":
        return PLAIN[activation]
    names = ("alpha_p", "alpha_n", "beta", "eps")
    shapes: tuple[tuple[int, ...], ...] = ((1,), (1,), (), ())
    values = [parts.weights.float32(f"{name}.act_fn.{part}", *shape) for part, shape in zip(names, shapes, strict=True)]
    parts.weights.settle()
    positive, negative, beta, eps = values
    return XIELU(F.softplus(positive), beta + F.softplus(negative), beta, eps)


@dataclass(frozen=True, slots=True, eq=False)
class XIELU:
    """The activation xIELU with its learnt factors (arXiv 2411.13010), float32."""

    positive: Tensor
    negative: Tensor
    beta: Tensor
    eps: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        above = self.positive * wide * wide
        below = (torch.expm1(torch.minimum(wide, self.eps)) - wide) * self.negative
        return x.copy_(torch.where(wide > 0, above, below) + self.beta * wide)
