"""The division of a model and its KV among ranks (docs/design/tensor-parallelism.md).

    8 KV heads, 4 ranks        0 1 | 2 3 | 4 5 | 6 7    shares: one rank holds each head
    2 KV heads, 4 ranks          0 |   0 |   1 |   1    replicas: each supplies some layers of a read

Sums are of float32 and are rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.kernels.base import Linear, Scratch
from baton.engine.kernels.quantized import SCHEMES, Quantize, QuantizedWeight, quantize
from baton.engine.models.checkpoint import Checkpoint, Weights
from baton.engine.models.config import ModelConfig
from baton.engine.models.llama import Norm, Parts, TorchNorm
from baton.engine.tp.group import Exchange
from baton.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Heads:
    """Distribution of `kv_heads` heads over `size` ranks. Raises ConfigError if ranks would hold unequal numbers."""

    kv_heads: int
    size: int

    def __post_init__(self) -> None:
        if min(self.kv_heads, self.size) < 1:
            raise ConfigError(f"{self.kv_heads} KV heads on {self.size} ranks: both must be at least 1")
        if self.kv_heads % self.size and self.size % self.kv_heads:
            text = "neither number divides the other, so some ranks would hold more heads than others"
            raise ConfigError(f"{self.kv_heads} KV heads cannot be divided among {self.size} ranks: {text}")

    @property
    def per_rank(self) -> int:
        return max(1, self.kv_heads // self.size)

    @property
    def replicas(self) -> int:
        return max(1, self.size // self.kv_heads)

    def held(self, rank: int) -> range:
        first = rank * self.kv_heads // self.size
        return range(first, first + self.per_rank)


class Rectangle(NamedTuple):
    """Heads of layers that a rank supplies or takes. Both are numbers in the whole model."""

    rank: int
    layers: range
    heads: range


def read_plan(source: Heads, reader: Heads, rank: int, layers: int) -> list[Rectangle]:
    """Return the rectangles that `rank` of `reader` reads from the ranks of `source`: each head that it holds, in each
    layer, once. Replicas of a head supply numbers of layers that differ by at most 1, all readers together.
    """
    if source.kv_heads != reader.kv_heads:
        raise ValueError(f"{source.kv_heads} KV heads at the source and {reader.kv_heads} at the reader")
    found, held, before = list[Rectangle](), reader.held(rank), rank % reader.replicas * layers
    for giver in range(source.size):
        heads = common(source.held(giver), held)
        part, read = giver % source.replicas, reader.replicas * layers  # the layers of all readers, one after the other
        share = range(read * part // source.replicas, read * (part + 1) // source.replicas)
        rows = common(range(share.start - before, share.stop - before), range(layers))
        if heads and rows:
            found.append(Rectangle(giver, rows, heads))
    return found


def common(a: range, b: range) -> range:
    """Return the numbers that are in both ranges."""
    return range(max(a.start, b.start), min(a.stop, b.stop))


def divided(config: ModelConfig, size: int, key: str, quantize: Quantize = "none") -> ModelConfig:
    """Return the config of each of `size` ranks. Raises ConfigError with `key` and sizes that it does not divide."""
    stored = None if config.quantised is None else config.quantised.scheme
    groups = {0 if stored is None else stored.group, 0 if quantize == "none" else SCHEMES[quantize].group} - {0}
    if why := _undivided(config, quantize):
        raise ConfigError(f"{key}: {size} is not supported for {why}; set {key} to 1")
    if uneven := _uneven(config, size, groups):
        fits = ", ".join(str(n) for n in range(1, config.heads + 1) if not _uneven(config, n, groups))
        raise ConfigError(f"{key}: {size} does not divide the model's {' and '.join(uneven)}; allowed are {fits}")
    kv_heads, inner = Heads(config.kv_heads, size).per_rank, config.intermediate_size // size
    spec, experts = config.spec, config.experts
    counts = [each.kv_heads and Heads(each.kv_heads, size).per_rank for each in spec.attention]
    spec = replace(
        spec,
        attention=tuple(replace(each, kv_heads=n) for each, n in zip(spec.attention, counts, strict=True)),
        recurrent=tuple(each and each.divided(size) for each in spec.recurrent),
        wide=tuple(each // size for each in spec.wide),
    )
    if experts is not None:
        own = replace(experts, inner=experts.inner // size, shared_inner=experts.shared_inner // size)
        spec = replace(spec, experts=own)
    return replace(config, heads=config.heads // size, kv_heads=kv_heads, intermediate_size=inner, spec=spec)


def _undivided(config: ModelConfig, quantize: Quantize) -> str:
    """Return what cannot be divided, or ""."""
    if config.experts is not None and (config.quantised is not None or quantize != "none"):
        return "quantised experts"
    norms = (each.head_norm for each in config.spec.attention)
    if any(norm is not None and norm.over == "width" and norm.norm.kind != "rms" for norm in norms):
        return "layer norms over all heads"
    return ""


def _uneven(config: ModelConfig, size: int, groups: set[int]) -> list[str]:
    """Return the keys and values that `size` ranks cannot share evenly. Ranks may share a KV head, and cut no group of
    quantised inputs.
    """
    heads, kv_heads, inner, attention = config.heads, config.kv_heads, config.intermediate_size, config.spec.attention
    found = [f"num_attention_heads ({heads})"] if heads % size else []
    others = {each.kv_heads_key: each.kv_heads for each in attention if each.kv_heads and each.kv_heads != kv_heads}
    shared = not others and size % kv_heads == 0  # ranks that share a head have other rows, in some layers only
    counts = {"num_key_value_heads": kv_heads} | others
    found += [f"{key} ({n})" for key, n in counts.items() if n % size and not shared]
    found += [f"intermediate_size ({inner})"] if inner % size else []
    if config.experts is not None:
        widths = {"width of experts": config.experts.inner, "width of shared experts": config.experts.shared_inner}
        found += [f"{name} ({width})" for name, width in widths.items() if width % size]
    dims = {config.latent.value_dim} if config.latent else {each.head_dim or config.head_dim for each in attention}
    inputs = [*(("o_proj", heads * dim) for dim in sorted(dims)), ("down_proj", inner)]
    for spec in {*config.spec.recurrent} - {None}:
        assert spec is not None
        found += spec.uneven(size)
        inputs.append(("out_proj", spec.inner))
    cut = [(layer, n, group) for layer, n in inputs for group in groups if size > 1 and n % (size * group)]
    return found + [f"{layer} ({n} inputs in groups of {group})" for layer, n, group in cut]


KV = tuple(f".{part}.{end}" for part in ("k_proj", "v_proj", "k_norm") for end in ("weight", "bias"))


class ShardedWeights(Weights):
    """`Weights` of one rank: `joined` and `stack` return its rows, and `outs` are its sizes. Ranks that hold the same
    KV head have equal rows of its projections.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, rank: int, heads: Heads
    ) -> None:
        super().__init__(checkpoint, dtype, device)
        self.rank, self.size, self._replicas = rank, heads.size, heads.replicas

    def columns(self, name: str, out: int, n_in: int) -> Tensor:
        """Return the rank's `n_in` columns of a matrix with `size` times as many: [out, n_in]."""
        place = self._place((out, n_in))
        self._fill_from(place, name, (out, n_in * self.size), 1, self.rank * n_in)
        return place

    def rows(self, name: str, shape: tuple[int, int], rows: range) -> Tensor:
        place = self._place((len(rows), shape[1]))
        self._fill_from(place, name, shape, 0, rows.start)
        return place

    def down(self, names: Sequence[str], out: int, n_in: int) -> Tensor:
        place = self._place((len(names), out, n_in))
        for matrix, name in zip(place, names, strict=True):
            self._fill_from(matrix, name, (out, n_in * self.size), 1, self.rank * n_in)
        return place

    def whole(self, size: int) -> int:
        return size * self.size

    def own(self, tensor: Tensor, dim: int, parts: int = 1) -> Tensor:
        self.settle()
        shares = [part.chunk(self.size, dim)[self.rank] for part in tensor.chunk(parts, dim)]
        return self.keep(torch.cat(shares, dim))

    def once(self, tensor: Tensor) -> Tensor:
        return tensor if self.rank == 0 else torch.zeros_like(tensor)

    def float32_rows(self, name: str, *shape: int) -> Tensor:
        rows, first = self.share(name, shape[0])
        return self.float32(name, rows, *shape[1:])[first : first + shape[0]]

    def share(self, name: str, out: int, *, keys: bool = False) -> tuple[int, int]:
        """Return the rows of a whole tensor, and the first of the rank's `out` rows. Ranks may share KV heads."""
        copies = self._replicas if keys or name.endswith(KV) else 1
        return out * self.size // copies, self.rank // copies * out

    def shares(self, names: Sequence[str], outs: Sequence[int]) -> list[tuple[int, int]]:
        """Return the share of each of `outs`. A fused projection of three parts has keys and values after queries."""
        if len(names) == len(outs):
            return [self.share(name, out) for name, out in zip(names, outs, strict=True)]
        return [self.share(names[0], out, keys=len(outs) == 3 and i > 0) for i, out in enumerate(outs)]

    def _fill_from(self, place: Tensor, name: str, whole: tuple[int, ...], dim: int, start: int) -> None:
        """Read only the slice from `start` in dimension `dim` of a tensor of shape `whole`."""
        stored = self.checkpoint.take(name, whole)
        self._copy(place, stored.narrow(dim, start, place.shape[dim]), stored)

    def _fill_parts(self, place: Tensor, names: tuple[str, ...], outs: tuple[int, ...]) -> None:
        shares, own = self.shares(names, outs), torch.split(place, list(outs))
        if len(names) < len(outs):
            starts = accumulate((rows for rows, _ in shares), initial=0)
            stored = self.checkpoint.take(names[0], (sum(rows for rows, _ in shares), *place.shape[1:]))
            pieces = [(start + first, part) for start, (_, first), part in zip(starts, shares, own, strict=False)]
            taken = torch.cat([stored[first : first + len(part)] for first, part in pieces])
            self.checkpoint.release(stored)
            return self._copy(place, taken, taken)
        for name, part, (rows, first) in zip(names, own, shares, strict=True):
            self._fill_from(part, name, (rows, *part.shape[1:]), 0, first)
        return None


@dataclass(frozen=True, slots=True, eq=False)
class ShardedParts(Parts):
    """`Parts` of one rank."""

    weights: ShardedWeights
    exchange: Exchange

    def summed(self, name: str, out: int, n_in: int, *, bias: bool) -> Linear:
        added = self.weights.tensor(f"{name}.bias", out) if bias else None
        held, whole_k = added if self.exchange.rank == 0 else None, n_in * self.exchange.size
        stored = self.weights.checkpoint.scheme([f"{name}.weight"])
        if stored is not None and stored.divides(whole_k, n_in):
            whole = Parts._packed(self, (name,), (out,), whole_k)
        elif self.quantize != "none":  # scales are those of whole rows, as on one rank
            wide = self.weights.float32(f"{name}.weight", out, whole_k).to(self.weights.dtype)
            whole = quantize(wide, SCHEMES[self.quantize])
        else:
            return Summed(self.layer(self.weights.columns(f"{name}.weight", out, n_in), held), self.exchange)
        own = whole.columns(range(self.exchange.rank * n_in, (self.exchange.rank + 1) * n_in))
        return Summed(self.kernels.quantized(own, held, self.weights.keep), self.exchange)

    def _packed(self, names: tuple[str, ...], outs: tuple[int, ...], n_in: int) -> QuantizedWeight:
        """Return the rank's rows. It reads all rows, because several zero levels may share a word."""
        shares = self.weights.shares([f"{name}.weight" for name in names], outs)
        starts = accumulate((rows for rows, _ in shares), initial=0)
        own = [start + first + torch.arange(out) for start, (_, first), out in zip(starts, shares, outs, strict=False)]
        return Parts._packed(self, names, tuple(rows for rows, _ in shares), n_in).rows(torch.cat(own))

    def replays(self, scratch: Scratch) -> None:
        """Return None, because sums over ranks are no calls of kernels."""

    def total(self, x: Tensor) -> Tensor:
        return _sum(x, x, self.exchange)

    def shared_mean(self, means: Tensor, copies: int) -> Tensor:
        if copies == 1:
            return means
        every, group = means.new_zeros(len(means), self.exchange.size // copies), self.exchange.rank // copies
        every[:, group] = means[:, 0, 0] / copies
        return _sum(every, every, self.exchange)[:, group, None, None]

    def width_norm(self, norm: TorchNorm) -> Norm:
        return DividedNorm(norm, self.exchange)

    def head(self, embed: Tensor, *, tied: bool, name: str = "lm_head", bias: bool = False) -> Linear:
        vocab, n_in = embed.shape
        ends = [vocab * rank // self.exchange.size for rank in range(self.exchange.size + 1)]
        own = range(*ends[self.exchange.rank :][:2])
        extra = self.weights.tensor(f"{name}.bias", vocab)[own.start : own.stop] if bias else None
        if not tied and self.are_stored((name,)):
            packed = Parts._packed(self, (name,), (vocab,), n_in).rows(torch.arange(own.start, own.stop))
            return Gathered(self.kernels.quantized(packed, extra, self.weights.keep), ends, self.exchange)
        weight = embed[own.start : own.stop] if tied else self.weights.rows(f"{name}.weight", (vocab, n_in), own)
        return Gathered(self.layer(weight, extra), ends, self.exchange)


def _sum(x: Tensor, out: Tensor, exchange: Exchange) -> Tensor:
    """Write the sum of x [N, width] over ranks to `out`."""
    for rows in _pieces(len(x), exchange.capacity // x.shape[1]):
        exchange.place(rows.stop - rows.start, x.shape[1]).copy_(x[rows])
        exchange.add(out[rows])
    return out


@dataclass(frozen=True, slots=True, eq=False)
class DividedNorm:
    """A root mean square norm over the heads of all ranks. All heads are on equally many ranks."""

    norm: TorchNorm
    exchange: Exchange

    def __call__(self, x: Tensor, out: Tensor, delta: Tensor | None = None) -> Tensor:
        assert delta is None
        wide = x.float()
        means = wide.pow(2).mean(-1, keepdim=True)
        mean = _sum(means, means, self.exchange) / self.exchange.size
        return out.copy_(wide * torch.rsqrt(mean + self.norm.eps) * self.norm.weight)


@dataclass(frozen=True, slots=True, eq=False)
class Summed:
    """A `Linear` with input features divided among ranks. Every rank sums the products."""

    part: Linear
    exchange: Exchange

    @property
    def width(self) -> int:
        return self.part.width

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        for rows in _pieces(len(x), self.exchange.capacity // self.width):
            self.part(x[rows], self.exchange.place(rows.stop - rows.start, self.width))
            self.exchange.add(out[rows])
        return out


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """A `Linear` with output features `ends[r]` to `ends[r + 1]` on rank r. Only rank 0 writes the result to `out`."""

    part: Linear
    ends: list[int]
    exchange: Exchange

    @property
    def width(self) -> int:
        return self.ends[-1]

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        widest = -(-self.width // self.exchange.size)
        for rows in _pieces(len(x), self.exchange.capacity // widest):
            place = self.exchange.place(rows.stop - rows.start, widest)
            self.part(x[rows], place[:, : self.part.width])
            parts = self.exchange.swap()
            if self.exchange.rank == 0:
                for part, start, stop in zip(parts, self.ends, self.ends[1:], strict=False):
                    out[rows, start:stop] = part[:, : stop - start]
        return out


def _pieces(rows: int, most: int) -> Iterator[slice]:
    for start in range(0, rows, most):
        yield slice(start, min(start + most, rows))
