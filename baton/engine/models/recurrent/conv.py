"""The causal convolution of recurrent layers, and the short convolution of LFM2.

A convolution mixes each channel of a token with the same channel of the `width` - 1 tokens before it. These are its
state. All operations are elementwise, so a row's bits depend neither on the batch nor on the chunks of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from baton.engine.batch import StateRows
from baton.engine.models.checkpoint import Weights
from baton.engine.models.llama import Parts, Step
from baton.engine.models.recurrent.spec import Part, ShortConvSpec, rows_of, whole


def sequences(states: StateRows) -> Iterator[tuple[int, slice]]:
    """Yield the slot of each sequence, and its rows of the batch."""
    starts = states.starts or [0, *accumulate(states.counts)]
    for slot, count, at in zip(states.slots, states.counts, starts, strict=False):
        yield slot, slice(at, at + count)


def waves(states: StateRows) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows of the first token of each sequence, then of the second, and so on: int64 [n], and slots [n]."""
    spans = [(slot, part) for slot, part in sequences(states) if part.start < part.stop]
    for number in range(max((part.stop - part.start for _, part in spans), default=0)):
        found = [(part.start + number, slot) for slot, part in spans if part.start + number < part.stop]
        rows, slots = torch.tensor(found).unbind(1)
        yield rows, slots


class CausalConv:
    """A causal convolution of a rank's `channels`, in float32. Its state begins at number `offset` of a sequence's
    row.
    """

    def __init__(
        self, weights: Weights, name: str, channels: Sequence[Part], width: int, *, bias: bool, offset: int
    ) -> None:
        every, own = whole(channels, weights.size), rows_of(channels, weights.rank, weights.size)
        taps = weights.float32(f"{name}.weight", every, 1, width)
        self.bias = weights.float32(f"{name}.bias", every) if bias else None
        weights.settle()
        self.bias = None if self.bias is None else self.bias[own]
        self.taps = taps[own, 0].t().contiguous()  # [width, channels]
        self.shape = (-1, width - 1, len(own))
        self.part = slice(offset, offset + (width - 1) * len(own))

    def __call__(self, x: Tensor, states: StateRows) -> Tensor:
        """Return the convolved rows, float32 [N, channels], and update the states. x is float32 [N, channels]."""
        tails, before = states.memory[:, self.part].view(self.shape), self.shape[1]
        if states.single:  # one token of each sequence
            rows = torch.cat((tails[states.index], x[:, None]), 1)
            tails[states.index] = rows[:, 1:]
            return self._mixed(rows.transpose(0, 1), 1)[0]
        out = torch.zeros_like(x)
        for slot, part in sequences(states):
            rows = torch.cat((tails[slot], x[part]))
            tails[slot] = rows[len(rows) - before :]
            out[part] = self._mixed(rows, part.stop - part.start)
        return out

    def _mixed(self, rows: Tensor, count: int) -> Tensor:
        """Return the last `count` rows, each mixed with those before it."""
        found = rows[:count] * self.taps[0]
        for place in range(1, len(self.taps)):
            found += rows[place : place + count] * self.taps[place]
        return found if self.bias is None else found.add_(self.bias)


class ShortConv:
    """A layer of LFM2 in place of attention."""

    def __init__(self, spec: ShortConvSpec, parts: Parts, name: str, hidden: int, offset: int) -> None:
        self.inputs = parts.picked((f"{name}.in_proj",), [spec.convolved * 3], hidden, bias=spec.bias)
        self.conv = CausalConv(parts.weights, f"{name}.conv", spec.convolved, spec.width, bias=spec.bias, offset=offset)
        self.out = parts.summed(f"{name}.out_proj", hidden, spec.inner, bias=spec.bias)

    def __call__(self, x: Tensor, step: Step, keys: Tensor, values: Tensor) -> Tensor:
        assert step.states is not None
        take, rows = step.scratch.take, len(x)
        before, after, inner = self.inputs(x, take("bcx", rows, self.inputs.width)).chunk(3, dim=-1)
        mixed = self.conv((before * inner).float(), step.states)
        gated = take("convolved", rows, mixed.shape[1]).copy_(mixed).mul_(after)
        return self.out(gated, take("delta", rows, self.out.width))
