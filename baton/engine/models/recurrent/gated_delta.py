"""The gated delta net (arXiv 2412.06464) of Qwen3-Next and Qwen3.5, as in `transformers`, in float32.

    q, k, v = silu(conv(in(x)));  q, k of length 1;  beta = sigmoid(b(x));  g = -exp(A) * softplus(a(x) + dt)
    S = exp(g) S + k beta (v - k^T exp(g) S)        for each token and value head, S [key_dim, value_dim]
    y = out(norm(q^T S / sqrt(key_dim)) * silu(z(x)))

Prompts are computed in chunks. A chunk solves one triangular system for all its writes, instead of a loop.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.engine.kernels.elementwise import mapped
from baton.engine.models.llama import Parts, Step
from baton.engine.models.recurrent.conv import CausalConv, sequences, waves
from baton.engine.models.recurrent.spec import GatedDeltaSpec, Part

CHUNK = 64
LENGTH_EPS = 1e-6


class _Rows(NamedTuple):
    """Float32 rows of all value heads: q and k [heads, N, key_dim], v [heads, N, value_dim], g and beta [heads, N]."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor

    def part(self, begin: int, end: int) -> _Rows:
        return _Rows(*(each[:, begin:end] for each in self))

    def chunk(self, begin: int, end: int) -> _Rows:
        """Return a whole chunk in memory of its own, where tokens from `end` on change nothing."""
        found = _Rows(*(each[:, begin : begin + CHUNK].clone(memory_format=torch.contiguous_format) for each in self))
        found.decay[:, end - begin :] = found.beta[:, end - begin :] = 0
        return found

    def at(self, rows: Tensor) -> _Rows:
        return _Rows(*(each[:, rows] for each in self))


class GatedDelta:
    """A layer in place of attention."""

    def __init__(self, spec: GatedDeltaSpec, parts: Parts, name: str, hidden: int, offset: int) -> None:
        self.spec, weights, heads = spec, parts.weights, (Part(spec.value_heads),)
        wide, narrow = (*spec.convolved, Part(spec.values)), heads * 2
        if spec.grouped:
            per_key, groups = spec.per_key, spec.key_heads * spec.ranks // spec.copies
            order = _ungrouped(groups, [spec.key_dim] * 2 + [per_key * spec.value_dim] * 2)
            self.inputs = parts.picked((f"{name}.in_proj_qkvz",), [wide], hidden, bias=False, order=order)
            order = _ungrouped(groups, [per_key] * 2)
            self.rates = parts.picked((f"{name}.in_proj_ba",), [narrow], hidden, bias=False, order=order)
        else:
            names, rates = ([f"{name}.in_proj_{part}" for part in pair] for pair in (("qkv", "z"), "ba"))
            self.inputs = parts.picked(names, [wide[:3], wide[3:]], hidden, bias=False)
            self.rates = parts.picked(rates, [heads, heads], hidden, bias=False)
        self.conv = CausalConv(weights, f"{name}.conv1d", spec.convolved, spec.width, bias=False, offset=offset)
        begin = self.conv.part.stop
        self.part = slice(begin, begin + spec.matrix)
        self.decay, self.dt = (
            weights.float32_rows(f"{name}.{part}", spec.value_heads) for part in ("A_log", "dt_bias")
        )
        self.norm = weights.float32(f"{name}.norm.weight", spec.value_dim)
        weights.settle()
        self.decay = -self.decay.exp()
        self.out = parts.summed(f"{name}.out_proj", hidden, spec.values, bias=False)

    def __call__(self, x: Tensor, step: Step, keys: Tensor, values: Tensor) -> Tensor:
        assert step.states is not None
        take, rows, spec = step.scratch.take, len(x), self.spec
        inputs = self.inputs(x, take("delta_inputs", rows, self.inputs.width))
        rates = self.rates(x, take("delta_rates", rows, self.rates.width)).float()
        fixed = step.states.fixed
        mixed = mapped(F.silu, self.conv(inputs[:, : spec.channels].float(), step.states), fixed=fixed)
        found = self._recurrent(self._rows(mixed, rates, fixed=fixed), step)
        normed = found * torch.rsqrt(found.pow(2).mean(-1, keepdim=True) + spec.eps) * self.norm
        gate = mapped(F.silu, inputs[:, spec.channels :].float(), fixed=fixed)
        gated = take("delta_outputs", rows, spec.values).copy_(normed.view(rows, -1) * gate)
        return self.out(gated, take("delta", rows, self.out.width))

    def _rows(self, mixed: Tensor, rates: Tensor, *, fixed: bool) -> _Rows:
        spec, beta = self.spec, mapped(torch.sigmoid, rates[:, : self.spec.value_heads], fixed=fixed)
        decay = self.decay * mapped(F.softplus, rates[:, spec.value_heads :] + self.dt, fixed=fixed)
        query, key, value = torch.split(mixed, [spec.keys, spec.keys, spec.values], dim=-1)
        query, key = (self._heads(each) for each in (query, key))
        value = value.view(len(mixed), spec.value_heads, -1).transpose(0, 1)
        return _Rows(query * spec.key_dim**-0.5, key, value, decay.t(), beta.t())

    def _heads(self, rows: Tensor) -> Tensor:
        """Return [value_heads, N, key_dim], each of length 1."""
        heads = rows.view(len(rows), self.spec.key_heads, -1)
        heads = heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + LENGTH_EPS)
        return heads.repeat_interleave(self.spec.value_heads // self.spec.key_heads, dim=1).transpose(0, 1)

    def _recurrent(self, rows: _Rows, step: Step) -> Tensor:
        """Return what the queries read, [N, heads, value_dim], and update the states."""
        assert step.states is not None
        spec, states = self.spec, step.states
        memory = states.memory[:, self.part].view(-1, spec.value_heads, spec.key_dim, spec.value_dim)
        if states.single and not states.fixed:
            out, memory[states.index] = _token(rows, memory[states.index])
            return out
        out = torch.zeros_like(rows.value)
        if states.fixed and not states.on_grid:
            for index, slots in waves(states):
                read, memory[slots] = _token(rows.at(index), memory[slots], fixed=True)
                out[:, index] = read.transpose(0, 1)
            return out.transpose(0, 1).contiguous()
        for slot, part in sequences(states):
            for begin in range(part.start, part.stop, CHUNK):
                end = min(begin + CHUNK, part.stop)
                chunk = rows.chunk(begin, end) if states.fixed else rows.part(begin, end)
                read, memory[slot] = _chunk(chunk, memory[slot].clone() if states.fixed else memory[slot])
                out[:, begin:end] = read[:, : end - begin]
        return out.transpose(0, 1).contiguous()


def _token(rows: _Rows, states: Tensor, *, fixed: bool = False) -> tuple[Tensor, Tensor]:
    """Return what one token of each sequence reads, [N, heads, value_dim], and their states [N, heads, ...]. If
    `fixed`, bits do not depend on N, which those of products of matrices may.
    """
    query, key, value, decay, beta = (each.transpose(0, 1) for each in rows)
    states = states * mapped(torch.exp, decay, fixed=fixed)[..., None, None]
    written = (value - _read(key, states, fixed=fixed)) * beta[..., None]
    states += key[..., None] * written[:, :, None]
    return _read(query, states, fixed=fixed), states


def _read(rows: Tensor, states: Tensor, *, fixed: bool) -> Tensor:
    return (rows[..., None] * states).sum(-2) if fixed else (rows[:, :, None] @ states)[:, :, 0]


def _chunk(rows: _Rows, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the tokens of a chunk read, [heads, N, value_dim], and the state after it."""
    query, key, value, decay, beta = rows
    total = decay.cumsum(1)
    later = torch.ones(key.shape[1], key.shape[1], dtype=torch.bool, device=key.device).triu(1)
    between = (total[:, :, None] - total[:, None]).masked_fill(later, float("-inf")).exp()
    scaled = key * beta[..., None]
    system = (scaled @ key.transpose(1, 2)) * between
    wanted = value * beta[..., None] - (scaled * total.exp()[..., None]) @ state
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    read = ((query @ key.transpose(1, 2)) * between) @ written + (query * total.exp()[..., None]) @ state
    left = key * (total[:, -1:] - total).exp()[..., None]
    return read, state * total[:, -1].exp()[:, None, None] + left.transpose(1, 2) @ written


def _ungrouped(groups: int, widths: list[int]) -> Tensor:
    """Return the order of rows that puts the parts of all groups together. Each group has parts of these widths."""
    every = torch.arange(groups * sum(widths)).view(groups, -1)
    return torch.cat([part.flatten() for part in torch.split(every, widths, dim=1)])
