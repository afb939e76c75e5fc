"""Mamba 2 (arXiv 2405.21060), as in `transformers`, in float32.

    z, u, dt = in(x);  x, B, C = silu(conv(u));  dt = clamp(softplus(dt + bias));  g = -exp(A) * dt
    S = exp(g) S + dt x B^T                       for each token and head, S [head_dim, states]
    y = out(norm((S C + D x) * silu(z)))          the norm is over each group of heads

Prompts are computed in chunks, in which tokens read each other by products of matrices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.engine.kernels.elementwise import mapped
from baton.engine.models.llama import Parts, Step
from baton.engine.models.recurrent.conv import CausalConv, sequences, waves
from baton.engine.models.recurrent.spec import MambaSpec, Part

CHUNK = 64


class _Rows(NamedTuple):
    """Float32 rows of all heads: x [heads, N, head_dim], B and C [heads, N, states], dt and g [heads, N]."""

    x: Tensor
    write: Tensor
    read: Tensor
    dt: Tensor
    decay: Tensor

    def part(self, begin: int, end: int) -> _Rows:
        return _Rows(*(each[:, begin:end] for each in self))

    def chunk(self, begin: int, end: int) -> _Rows:
        """Return a whole chunk in memory of its own, where tokens from `end` on change nothing."""
        found = _Rows(*(each[:, begin : begin + CHUNK].clone(memory_format=torch.contiguous_format) for each in self))
        found.decay[:, end - begin :] = found.dt[:, end - begin :] = 0
        return found

    def at(self, rows: Tensor) -> _Rows:
        return _Rows(*(each[:, rows] for each in self))


class Mamba:
    """A layer in place of attention."""

    def __init__(self, spec: MambaSpec, parts: Parts, name: str, hidden: int, offset: int) -> None:
        self.spec, weights = spec, parts.weights
        wide = (Part(spec.inner), *spec.convolved, Part(spec.heads))
        self.inputs = parts.picked((f"{name}.in_proj",), [wide], hidden, bias=spec.bias)
        conv = spec.convolved, spec.width
        self.conv = CausalConv(weights, f"{name}.conv1d", *conv, bias=spec.conv_bias, offset=offset)
        self.part = slice(self.conv.part.stop, self.conv.part.stop + spec.matrix)
        self.dt, decay, self.skip = (
            weights.float32_rows(f"{name}.{part}", spec.heads) for part in ("dt_bias", "A_log", "D")
        )
        self.norm = weights.float32_rows(f"{name}.norm.weight", spec.inner)
        self.mean = parts.shared_mean
        weights.settle()
        self.decay = -decay.exp()
        self.out = parts.summed(f"{name}.out_proj", hidden, spec.inner, bias=spec.bias)

    def __call__(self, x: Tensor, step: Step, keys: Tensor, values: Tensor) -> Tensor:
        assert step.states is not None
        take, count, spec = step.scratch.take, len(x), self.spec
        inputs = self.inputs(x, take("mamba_inputs", count, self.inputs.width))
        gate, mixed, dt = torch.split(inputs, [spec.inner, spec.channels, spec.heads], dim=-1)
        fixed = step.states.fixed
        rows = self._rows(mapped(F.silu, self.conv(mixed.float(), step.states), fixed=fixed), dt.float(), fixed=fixed)
        found = (self._recurrent(rows, step) + rows.x.transpose(0, 1) * self.skip[:, None]).reshape(count, -1)
        grouped = (found * mapped(F.silu, gate.float(), fixed=fixed)).view(count, spec.groups, -1)
        means = self.mean(grouped.pow(2).mean(-1, keepdim=True), spec.copies)
        normed = (grouped * torch.rsqrt(means + spec.eps)).view(count, -1) * self.norm
        return self.out(take("mamba_outputs", count, spec.inner).copy_(normed), take("delta", count, self.out.width))

    def _rows(self, mixed: Tensor, dt: Tensor, *, fixed: bool) -> _Rows:
        spec, count = self.spec, len(mixed)
        x, write, read = torch.split(mixed, [spec.inner, *[spec.groups * spec.states] * 2], dim=-1)
        each = spec.heads // spec.groups
        write, read = (
            part.view(count, spec.groups, -1).repeat_interleave(each, dim=1).transpose(0, 1) for part in (write, read)
        )
        dt = mapped(F.softplus, dt + self.dt, fixed=fixed).clamp(*spec.limits)
        return _Rows(x.view(count, spec.heads, -1).transpose(0, 1), write, read, dt.t(), (dt * self.decay).t())

    def _recurrent(self, rows: _Rows, step: Step) -> Tensor:
        """Return what the tokens read, [N, heads, head_dim], and update the states."""
        assert step.states is not None
        spec, states = self.spec, step.states
        memory = states.memory[:, self.part].view(-1, spec.heads, spec.head_dim, spec.states)
        if states.single and not states.fixed:
            out, memory[states.index] = _token(rows, memory[states.index])
            return out
        out = torch.zeros_like(rows.x)
        if states.fixed and not states.on_grid:
            for index, slots in waves(states):
                found, memory[slots] = _token(rows.at(index), memory[slots], fixed=True)
                out[:, index] = found.transpose(0, 1)
            return out.transpose(0, 1)
        for slot, part in sequences(states):
            for begin in range(part.start, part.stop, CHUNK):
                end = min(begin + CHUNK, part.stop)
                chunk = rows.chunk(begin, end) if states.fixed else rows.part(begin, end)
                found, memory[slot] = _chunk(chunk, memory[slot].clone() if states.fixed else memory[slot])
                out[:, begin:end] = found[:, : end - begin]
        return out.transpose(0, 1)


def _token(rows: _Rows, states: Tensor, *, fixed: bool = False) -> tuple[Tensor, Tensor]:
    """Return what one token of each sequence reads, [N, heads, head_dim], and their states [N, heads, ...]. If `fixed`,
    bits do not depend on N, which those of products of matrices may.
    """
    x, write, read, dt, decay = (each.transpose(0, 1) for each in rows)
    states = states * mapped(torch.exp, decay, fixed=fixed)[..., None, None]
    states += (x * dt[..., None])[..., None] * write[:, :, None]
    return (states * read[:, :, None]).sum(-1) if fixed else (states @ read[..., None])[..., 0], states


def _chunk(rows: _Rows, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the tokens of a chunk read, [heads, N, head_dim], and the state after it."""
    x, write, read, dt, decay = rows
    total, written = decay.cumsum(1), x * dt[..., None]
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
    between = (total[:, :, None] - total[:, None]).masked_fill(later, float("-inf")).exp()
    found = ((read @ write.transpose(1, 2)) * between) @ written
    found += (read * total.exp()[..., None]) @ state.transpose(1, 2)
    left = write * (total[:, -1:] - total).exp()[..., None]
    return found, state * total[:, -1].exp()[:, None, None] + written.transpose(1, 2) @ left
