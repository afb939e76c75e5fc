"""Mixture of experts: each token passes through the few networks that a router chooses for it.

    scores = softmax(router(x))             DeepSeek-V3: sigmoid, and a learnt bias used only for the choice
    chosen = top_k(scores)                  DeepSeek: among the experts of the best groups
    weights = scores[chosen]                divided by their sum or not, and scaled
    y = sum of weights_e * expert_e(x)      DeepSeek adds a shared network that computes every token

Rows are sorted by expert, so that each active expert computes all its rows in one product of varying size. On a GPU,
one launch computes all experts, without reading the choice on the host (`Kernels.grouped`). Elsewhere a fixed forward
uses `Kernels.by_row` products instead; without them, each active expert computes all rows of the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from baton.engine.kernels.base import Grouped, Kernels, Linear
from baton.engine.kernels.elementwise import mapped
from baton.engine.kernels.torch_reference import PLAIN
from baton.engine.models.config import ModelConfig
from baton.engine.models.config_variants import ExpertsConfig
from baton.engine.models.llama import MLP, Parts, Step
from baton.engine.models.spec import Clamp


def feed_forward(config: ModelConfig, parts: Parts, layer: str, index: int) -> MLP | SparseMLP:
    """Return the feed-forward network of layer `index`. `layer` is the name prefix of its tensors."""
    if config.experts is None or not config.experts.sparse[index]:
        return MLP(config, parts, f"{layer}.{config.spec.names.mlp}", _width(config, index))
    mixtral = f"{layer}.block_sparse_moe"
    in_mixtral = f"{mixtral}.gate.weight" in parts.weights.checkpoint
    name, shared = f"{layer}.{config.spec.names.mlp}", f"{layer}.{config.spec.names.shared}"
    return SparseMLP(config, config.experts, parts, mixtral if in_mixtral else name, shared)


def _width(config: ModelConfig, index: int) -> int:
    return config.spec.wide[index] if config.spec.wide else config.intermediate_size


class SparseMLP:
    """A layer of experts: route, compute the chosen experts, add the output of the shared network."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, parts: Parts, name: str, shared: str) -> None:
        self.router = Router(config, experts, parts, name)
        self.experts = Experts(config, experts, parts, f"{name}.experts")
        self.shared = MLP(config, parts, shared, experts.shared_inner) if experts.shared_inner else None
        gated = experts.shared_inner and experts.shared_gate
        self.gate = parts.whole(f"{shared}_gate", 1, config.hidden_size, bias=False) if gated else None

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        weights, chosen = self.router(x, step)
        routed = self.experts(x, weights, chosen, step)
        if self.shared is None:
            return routed
        shared = self.shared(x, step)
        if self.gate is not None:
            gates = self.gate(x, step.scratch.take("shared_gate", x.shape[0], 1))
            shared.mul_(mapped(torch.sigmoid, gates, fixed=step.fixed))
        return shared.add_(routed)


class Router:
    """The choice of experts for each token, and their weights."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, parts: Parts, name: str) -> None:
        self.experts, names = experts, config.spec.names
        shape, gate = (experts.count, config.hidden_size), f"{name}.{names.router}"
        if f"{gate}.weight" not in parts.weights.checkpoint and f"{name}.router.weight" in parts.weights.checkpoint:
            gate = f"{name}.router"  # as transformers 5 writes it
        # The precision of transformers, so that near ties have the same winner.
        self.dtype = torch.float32 if experts.float32_router else parts.weights.dtype
        if experts.float32_router:
            self.gate: Linear = Float32Linear(parts.weights.float32(f"{gate}.weight", *shape))
        else:
            self.gate = parts.whole(gate, *shape, bias=experts.biased)
        bias = f"{name}.{names.correction}"
        self.bias = parts.weights.float32(bias, experts.count) if experts.corrected else None

    def __call__(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Return weights float32 [N, per_token] and experts int64 [N, per_token] for x [N, hidden]."""
        logits = self.gate(x, step.scratch.take("router", x.shape[0], self.gate.width, self.dtype)).float()
        sigmoid = self.experts.sigmoid
        scores = mapped(torch.sigmoid, logits, fixed=step.fixed) if sigmoid else logits.softmax(-1)
        ranks = scores + self.bias if self.bias is not None else logits if sigmoid else scores
        chosen = self._eligible(ranks).topk(self.experts.per_token)[1]
        weights = scores.gather(1, chosen)
        if self.experts.normalised:
            weights /= weights.sum(-1, keepdim=True) + self.experts.least
        return weights * self.experts.scaling, chosen

    def _eligible(self, ranks: Tensor) -> Tensor:
        """Mask `ranks` [N, experts] outside the best groups, ranked by best expert, or sum of best two with a bias."""
        if self.experts.best_groups == self.experts.groups:
            return ranks
        grouped = ranks.view(len(ranks), self.experts.groups, -1)
        of_group = grouped.amax(-1) if self.bias is None else grouped.topk(min(2, grouped.shape[2]))[0].sum(-1)
        best = of_group.topk(self.experts.best_groups)[1]
        outside = torch.ones_like(of_group, dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(outside[..., None], float("-inf")).flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class Float32Linear:
    """A `Linear` that computes in float32 for a model of any dtype."""

    weight: Tensor

    @property
    def width(self) -> int:
        return len(self.weight)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        return out.copy_(linear(x.float(), self.weight))


STACKS = ("gate_up_proj", "up_proj")  # the second one of experts without gates


class Expert(NamedTuple):
    """The two products of one expert."""

    gate_up: Linear
    down: Linear


class Experts:
    """The stacked weights of all experts, and the products with them."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, parts: Parts, name: str) -> None:
        self.grouped: tuple[Grouped, Grouped] | None = None
        self.scaled_inputs, clamp, self.total = experts.scaled_inputs, config.spec.mlp.clamp, parts.total
        gated = config.spec.mlp.gated
        self.outs = 2 if gated else 1
        self.gate: Callable[..., Tensor] = partial(parts.kernels.gate, activation=config.spec.mlp.activation)
        if clamp is not None:
            self.gate = partial(_clamped_gate, parts.kernels, clamp)
        if not gated:
            self.gate = partial(_plain, config.spec.mlp.activation)
        if _are_packed(config, parts, name):
            self.members = _one_by_one(config, experts, parts, name)
        else:
            gate_up, down = _stacked(config, experts, parts, name)
            biases = _biases(config, experts, parts, name)
            layers = zip(gate_up, down, *biases, strict=True)
            self.members = [Expert(parts.layer(a, c), parts.layer(b, d)) for a, b, c, d in layers]
            fits = parts.quantize == "none" and clamp is None and gated and not experts.biased
            self.grouped = _grouped(gate_up, down, parts.kernels) if fits else None
        self.by_row = _by_row(self.members, parts.kernels)

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor, step: Step) -> Tensor:
        """Return the weighted sum of the `chosen` experts [N, k] for x [N, hidden], summed in the order of `chosen`."""
        if self.scaled_inputs:
            return self._of_scaled(x, weights, chosen, step)
        (rows, width), each, take = x.shape, chosen.shape[1], step.scratch.take
        results = self._results(x, chosen, step).view(rows, each, width)
        return self.total(torch.sum(results.mul_(weights[..., None]), 1, out=take("routed", rows, width)))

    def _results(self, x: Tensor, chosen: Tensor, step: Step) -> Tensor:
        """Return the results of the chosen experts: [N * k, hidden]."""
        if self.grouped is not None:
            return self._by_groups(self.grouped, x, chosen, step)
        if step.fixed and self.by_row is None:
            return self._by_all_rows(x, chosen, step)
        return self._by_own_rows(self.by_row if step.fixed and self.by_row else self.members, x, chosen, step)

    def _of_scaled(self, x: Tensor, weights: Tensor, chosen: Tensor, step: Step) -> Tensor:
        """Return the sum for weighted inputs. Each pair of a row and an expert is a row of its own."""
        (rows, width), each = x.shape, chosen.shape[1]
        pairs = (x[:, None] * weights[..., None].to(x.dtype)).view(rows * each, width)
        results = self._results(pairs, chosen.view(-1, 1), step).view(rows, each, width)
        return self.total(torch.sum(results, 1, out=step.scratch.take("routed", rows, width)))

    def _by_groups(self, grouped: tuple[Grouped, Grouped], x: Tensor, chosen: Tensor, step: Step) -> Tensor:
        """Return results [N * k, hidden]. All experts compute in one launch; nothing is read by the host."""
        (rows, width), each, take, (gate_up, down) = x.shape, chosen.shape[1], step.scratch.take, grouped
        experts, order = chosen.flatten().sort(stable=True)  # pairs of a row and one of its experts
        groups = gate_up.groups(experts, fixed=step.fixed)
        pairs = torch.index_select(x, 0, order // each, out=take("pairs", rows * each, width))
        both = gate_up(pairs, groups, take("expert_gate_up", rows * each, gate_up.width))
        gated = self.gate(both, out=take("expert_gated", rows * each, gate_up.width // self.outs))
        return take("expert_results", rows * each, width).index_copy_(0, order, down(gated, groups, pairs))

    def _by_own_rows(self, members: list[Expert], x: Tensor, chosen: Tensor, step: Step) -> Tensor:
        """Return results [N * k, hidden]. Each expert computes the rows that chose it."""
        (rows, width), each, take = x.shape, chosen.shape[1], step.scratch.take
        order = chosen.flatten().argsort(stable=True)  # pairs of a row and one of its experts
        pairs = torch.index_select(x, 0, order // each, out=take("pairs", rows * each, width))
        counts = chosen.flatten().bincount(minlength=len(members)).tolist()
        for expert, own in zip(members, torch.split(pairs, counts), strict=True):
            if len(own):
                self._compute(expert, own, step)
        return take("expert_results", rows * each, width).index_copy_(0, order, pairs)

    def _by_all_rows(self, x: Tensor, chosen: Tensor, step: Step) -> Tensor:
        """Return the same. Each chosen expert computes all rows in place, so its products have a constant shape."""
        (rows, width), each, take = x.shape, chosen.shape[1], step.scratch.take
        results = take("expert_results", rows * each, width)
        for number, expert in enumerate(self.members):
            own = (chosen.flatten() == number).nonzero()[:, 0]
            if len(own):
                every = take("pairs", rows, width).copy_(x)
                self._compute(expert, every, step)
                results.index_copy_(0, own, every.index_select(0, own // each))
        return results

    def _compute(self, expert: Expert, rows: Tensor, step: Step) -> None:
        take, (gate_up, down) = step.scratch.take, expert
        both = gate_up(rows, take("expert_gate_up", rows.shape[0], gate_up.width))
        down(self.gate(both, out=take("expert_gated", rows.shape[0], gate_up.width // self.outs)), rows)


def _plain(activation: str, rows: Tensor, out: Tensor) -> Tensor:
    """Write the activation of experts that are not gated. Other forwards use the function of fixed ones too."""
    return out.copy_(mapped(PLAIN[activation], rows, fixed=True))


def _clamped_gate(kernels: Kernels, clamp: Clamp, both: Tensor, out: Tensor) -> Tensor:
    """Write the gate of `Clamp` to out [N, I], for both [N, 2 I], which is overwritten. x * sigmoid(alpha * x) is
    silu(alpha * x) / alpha, whose bits do not depend on the number of rows.
    """
    gate, up = both.chunk(2, dim=-1)
    gate.clamp_(max=clamp.limit).mul_(clamp.alpha)
    up.clamp_(-clamp.limit, clamp.limit).add_(1).div_(clamp.alpha)
    return kernels.gate(both, "silu", out)


def _grouped(gate_up: Tensor, down: Tensor, kernels: Kernels) -> tuple[Grouped, Grouped] | None:
    first, second = kernels.grouped(gate_up), kernels.grouped(down)
    return None if first is None or second is None else (first, second)


def _by_row(members: list[Expert], kernels: Kernels) -> list[Expert] | None:
    found = [
        Expert(gate_up, down)
        for each in members
        if (gate_up := kernels.by_row(each.gate_up)) is not None and (down := kernels.by_row(each.down)) is not None
    ]
    return found if len(found) == len(members) else None


def _one_by_one(config: ModelConfig, experts: ExpertsConfig, parts: Parts, name: str) -> list[Expert]:
    """Read the experts of a quantised checkpoint, each of which may be quantised or not."""
    inner, hidden = experts.inner, config.hidden_size
    up, down = _products(config, parts, name)
    return [
        Expert(
            parts.linear(tuple(f"{name}.{i}.{each}" for each in up), (inner,) * len(up), hidden, bias=False),
            parts.linear((f"{name}.{i}.{down}",), (hidden,), inner, bias=False),
        )
        for i in range(experts.count)
    ]


def _products(config: ModelConfig, parts: Parts, name: str) -> tuple[tuple[str, ...], str]:
    """Return the names of the projections of each expert: gate and up, or only up, and down."""
    if f"{name}.0.w1.weight" in parts.weights.checkpoint:
        return ("w1", "w3"), "w2"
    return (("gate_proj", "up_proj") if config.spec.mlp.gated else ("up_proj",)), "down_proj"


def _are_packed(config: ModelConfig, parts: Parts, name: str) -> bool:
    """Return whether an expert is quantised so that it can stay packed. Then each is read by itself."""
    up, down = _products(config, parts, name)
    return any(parts.are_stored((f"{name}.0.{product}",)) for product in (*up, down))


def _fused(config: ModelConfig, parts: Parts, name: str) -> tuple[str, str] | None:
    """Return the names of the stacked weights, if the file has them: of the family, or as transformers 5 writes them
    without `save_original_format`.
    """
    block = name.removesuffix(".experts")
    found = (
        (f"{block}.{one}", f"{block}.{other}")
        for one, other in (config.spec.names.stacked, *((f"experts.{up}", "experts.down_proj") for up in STACKS))
    )
    return next((pair for pair in found if pair[0] in parts.weights.checkpoint), None)


def _stacked(config: ModelConfig, experts: ExpertsConfig, parts: Parts, name: str) -> tuple[Tensor, Tensor]:
    """Read the weights [experts, 2 inner, hidden] and [experts, hidden, inner] from either checkpoint layout."""
    weights, (count, inner, hidden) = parts.weights, (experts.count, experts.inner, config.hidden_size)
    fused, outs = _fused(config, parts, name), 2 if config.spec.mlp.gated else 1
    if fused is not None:
        stored = weights.whole(inner)
        if experts.transposed:
            gate_up = _turned(parts, fused[0], count, hidden, outs * stored, paired=experts.paired)
            down = _turned(parts, fused[1], count, stored, hidden, paired=False)
        else:
            gate_up = weights.tensor(fused[0], count, outs * stored, hidden)
            down = weights.tensor(fused[1], count, hidden, stored)
        return weights.own(gate_up, 1, outs), weights.own(down, 2)
    up, down_name = _products(config, parts, name)
    ups = [tuple(f"{name}.{i}.{each}.weight" for each in up) for i in range(count)]
    downs = [f"{name}.{i}.{down_name}.weight" for i in range(count)]
    return weights.stack(ups, (inner,) * len(up), hidden), weights.down(downs, hidden, inner)


def _turned(parts: Parts, name: str, *shape: int, paired: bool) -> Tensor:
    """Read weights [experts, inputs, outputs] as [experts, outputs, inputs], with alternate rows after each other."""
    wide = parts.weights.float32(name, *shape)
    parts.weights.settle()
    outputs = wide.transpose(1, 2)
    return parts.weights.keep((_unpaired(outputs, 1) if paired else outputs).to(parts.weights.dtype).contiguous())


def _unpaired(x: Tensor, dim: int) -> Tensor:
    order = torch.arange(x.shape[dim], device=x.device).view(-1, 2).t().flatten()
    return x.index_select(dim, order)


def _biases(
    config: ModelConfig, experts: ExpertsConfig, parts: Parts, name: str
) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
    """Return the biases of all experts for each product, or None for each."""
    if not experts.biased:
        return [None] * experts.count, [None] * experts.count
    weights = parts.weights
    gate_up = weights.tensor(f"{name}.gate_up_proj_bias", experts.count, 2 * weights.whole(experts.inner))
    down = weights.tensor(f"{name}.down_proj_bias", experts.count, config.hidden_size)
    weights.settle()
    return list(weights.own(_unpaired(gate_up, 1) if experts.paired else gate_up, 1, 2)), list(weights.once(down))
