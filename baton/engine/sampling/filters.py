"""Filters of a draw: min-p, then top-k, then top-p. Among equal tokens at the edge, the lowest ids pass.

Mostly a few thousand columns suffice: `leaders` takes the groups of columns with the highest peaks. For each row,
`kept_leaders` returns whether its result is certainly that of all columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from baton.core import Sampling

NEVER = float("-inf")
LANES = 8  # columns of a group; column = lane * groups + group, which is fast to reduce
GROUPS = 256  # taken by `leaders`
SLACK = 4e-6  # bounds the relative error of `mass`: exponentials and their sum in float32
_OFF = 2**31  # top-k if it is off


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """Filter parameters of some rows, each `[rows, 1]`. A filter that is off passes everything."""

    floor: Tensor  # float32: log of min-p, for logits with maximum 0
    top_k: Tensor  # int64
    top_p: Tensor  # float64
    bounded: Tensor  # bool: has min-p or top-k
    has_floor: bool
    has_top_p: bool

    @staticmethod
    def of(samplings: Sequence[Sampling], vocab: int, device: torch.device) -> Limits:
        ks = [s.top_k if 0 < s.top_k < vocab else _OFF for s in samplings]
        ps = [s.top_p if s.top_p < 1 else float("inf") for s in samplings]
        bounded = [s.min_p > 0 or k < _OFF for s, k in zip(samplings, ks, strict=True)]
        return Limits(
            floor=torch.tensor([s.min_p for s in samplings], dtype=torch.float32, device=device).log()[:, None],
            top_k=torch.tensor(ks, device=device)[:, None],
            top_p=torch.tensor(ps, dtype=torch.float64, device=device)[:, None],
            bounded=torch.tensor(bounded, device=device)[:, None],
            has_floor=any(s.min_p > 0 for s in samplings),
            has_top_p=any(s.top_p < 1 for s in samplings),
        )

    def part(self, rows: slice) -> Limits:
        return replace(
            self, floor=self.floor[rows], top_k=self.top_k[rows], top_p=self.top_p[rows], bounded=self.bounded[rows]
        )


class Leaders(NamedTuple):
    """Columns int32 `[rows, m]`, ascending, and their values; all others are at most `bound` `[rows, 1]`."""

    values: Tensor
    columns: Tensor
    bound: Tensor


def leaders(x: Tensor, count: int = GROUPS) -> Leaders:
    """Return the `count` groups of columns of `x` `[rows, n]` with the highest peaks. Padding has columns from n on."""
    x = pad(x, (0, -x.shape[-1] % LANES), value=NEVER) if x.shape[-1] % LANES else x
    lanes = x.view(len(x), LANES, -1)
    groups = lanes.shape[-1]
    peaks = lanes.amax(dim=1)
    order = _partition(peaks, count)
    bound = peaks.gather(-1, order[:, -1 - count, None])
    chosen = order[:, None, -count:].sort(dim=-1).values
    values = lanes.gather(2, chosen.expand(-1, LANES, -1)).flatten(1)
    columns = torch.arange(0, LANES * groups, groups, device=x.device)[:, None] + chosen
    return Leaders(values, columns.flatten(1).int(), bound)


def _partition(x: Tensor, count: int) -> Tensor:
    """Return the columns of each row, ending with the next best one and the `count` best."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.argpartition(x.numpy(), x.shape[-1] - count - 1, axis=-1))
    return x.topk(count + 1, dim=-1).indices.flip(-1)


def mass(scaled: Tensor) -> Tensor:
    """Return the sum of each row's exponentials: float64 `[rows, 1]`, to a relative error of SLACK / 2."""
    powers = torch.from_numpy(np.exp(scaled.numpy())) if scaled.device.type == "cpu" else scaled.exp()
    return powers.sum(dim=-1, keepdim=True).double()


def descending(x: Tensor) -> Tensor:
    """Return the values of each row, best first."""
    if x.device.type == "cpu":  # numpy's sort is vectorised and 30 times as fast
        return torch.from_numpy(np.sort(x.numpy(), axis=-1)).flip(-1)
    return x.sort(dim=-1, descending=True).values


def kept(scaled: Tensor, limits: Limits) -> Tensor:
    """Return which columns of `scaled` `[rows, vocab]`, with maximum 0, pass the limits: bool, the same shape."""
    ranked = descending(scaled)
    size = _first(ranked, limits)
    if limits.has_top_p:
        _, before = _shares(ranked, size)
        size = _count(before < limits.top_p, size)
    return _best(scaled, ranked, size)


def kept_leaders(found: Leaders, limits: Limits, total: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return `kept` for the columns in `found`, and whether each row is right. `total` is the `mass` of all columns."""
    ranked = descending(found.values)
    size = _first(ranked, limits)
    last = ranked.gather(-1, limits.top_k.clamp(max=ranked.shape[-1]) - 1)
    last = last.masked_fill_(limits.top_k > ranked.shape[-1], NEVER).maximum(limits.floor)
    sure = last > found.bound  # all that passes min-p and top-k is here
    if limits.has_top_p and total is not None:
        shares, before = _shares(ranked, size)
        # Shares are relative to those that passed. If neither min-p nor top-k is on, top-p is relative to all columns.
        goal = torch.where(limits.bounded, limits.top_p, limits.top_p * shares[:, :1] * total)
        low, high = _count(before < goal * (1 - SLACK), size), _count(before < goal * (1 + SLACK), size)
        size = low
        sure = torch.where(limits.bounded, sure, ranked.gather(-1, size - 1) > found.bound) & (low == high)
    return _best(found.values, ranked, size), sure[:, 0]


def _first(ranked: Tensor, limits: Limits) -> Tensor:
    """Return how many ranked values pass min-p and top-k, `[rows, 1]`; at least one, even if it is NaN."""
    size = limits.top_k.clamp(max=ranked.shape[-1])
    return size.minimum(_count(ranked >= limits.floor, size)) if limits.has_floor else size


def _shares(ranked: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities among the first `size` of each row, and their sum before each; float64."""
    outside = torch.arange(ranked.shape[-1], device=ranked.device) >= size
    shares = ranked.double().masked_fill_(outside, NEVER).softmax(dim=-1)
    return shares, shares.cumsum(dim=-1).sub_(shares)


def _count(passed: Tensor, size: Tensor) -> Tensor:
    return passed.sum(dim=-1, keepdim=True).minimum(size).clamp_(min=1)


def _best(values: Tensor, ranked: Tensor, size: Tensor) -> Tensor:
    """Return a mask of the `size` best of each row of `values`; among equal ones, of the first."""
    edge = ranked.gather(-1, size - 1)
    reached = values >= edge
    if values.device.type == "cpu" and torch.equal(reached.sum(dim=-1, keepdim=True), size):
        return reached  # the common case; on other devices this test costs more than it saves
    at = values == edge
    places = size - (values > edge).sum(dim=-1, keepdim=True)
    return reached & (~at | (at.cumsum(dim=-1) <= places))
