"""Sampler: draws tokens for all rows of a step together, each as if it were alone.

First come repetition penalty (prompt and output), frequency and presence penalty (output), logit bias, and bans: end
tokens before `min_tokens`, then tokens that a constraint disallows. Then the choice is greedy, or temperature, min-p,
top-k, top-p and a draw: Gumbel-max with noise hashed from (seed, position in the sequence, column). Ties go to the
lowest token id, in argmax and filters. Log-probabilities are the log-softmax of the original logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.core import TokenLogprobs
from baton.engine.kernels.inference import inference
from baton.engine.sampling.filters import GROUPS, LANES, Limits, kept, kept_leaders, leaders, mass
from baton.engine.sampling.fused import FusedDraw, Parameters, has_filter
from baton.engine.sampling.logits import FINITE, NEVER, Adjustments, Masks, Row, log_softmax
from baton.engine.sampling.noise import columns_hash

NO_NUMBER, UNSURE = -1, -2  # in place of a token id
CACHED_COLUMNS = 65536  # per part of the noise, so that its temporaries stay in the CPU cache


class Sampled(NamedTuple):
    """A drawn token. `token_id` is None if none can be drawn, because the best logit is not a finite number. `margin`
    is the lead of its logit over the second best, if a row asks for it and all rows of the step are greedy.
    """

    token_id: int | None
    logprobs: TokenLogprobs | None
    margin: float = math.inf


class Sampler:
    """Draws one token for each row of a step. Data that depends only on the set of rows is kept with it. `fused` is the
    device's own draw, or None for that of torch.
    """

    def __init__(self, fused: FusedDraw | None = None) -> None:
        self._fused = fused
        self._rows: list[Row] = []
        self._plan: _Plan | None = None

    @inference
    def sample(self, logits: Tensor, rows: list[Row]) -> list[Sampled]:
        """Draw one token for each row of `logits` (float32 `[len(rows), vocab]`, left unchanged)."""
        plan = self._plan_of(rows, logits)
        scores = plan.adjust(logits)
        if plan.greedy and scores.device.type == "cpu":
            return _greedy(scores, margins=plan.with_margins)
        tokens = self._fused_draw(plan, scores, [0] * len(rows)) if self._fused else _drawn(plan, rows, scores)
        logprobs = _logprobs(logits, tokens, plan.with_logprobs, rows)
        found = enumerate(tokens.tolist())
        return [Sampled(None if token == NO_NUMBER else token, logprobs.get(i)) for i, token in found]

    @inference
    def draw(self, logits: Tensor, rows: list[Row], ahead: Sequence[int]) -> Tensor:
        """Return the tokens on the device, int64 `[rows]`, or NO_NUMBER. A fused draw does not wait for the device. Row
        i is drawn `ahead[i]` tokens later, like `Row.at`.
        """
        if self._fused is None:
            sampled = self.sample(logits, [row.at(n) if n else row for row, n in zip(rows, ahead, strict=True)])
            ids = [NO_NUMBER if each.token_id is None else each.token_id for each in sampled]
            return torch.tensor(ids, device=logits.device)
        plan = self._plan_of(rows, logits)
        return self._fused_draw(plan, plan.adjust(logits), ahead)

    def _plan_of(self, rows: list[Row], logits: Tensor) -> _Plan:
        if self._plan is None or rows != self._rows:
            self._rows, self._plan = list(rows), _Plan(rows, logits, fused=self._fused is not None)
        return self._plan

    def _fused_draw(self, plan: _Plan, scores: Tensor, ahead: Sequence[int]) -> Tensor:
        assert self._fused is not None
        assert plan.parameters is not None
        positions = [row.position + n for row, n in zip(self._rows, ahead, strict=True)]
        parameters = plan.parameters.at(positions, scores.device)
        return self._fused(scores, parameters, drawn=plan.parameters.drawn, filtered=plan.parameters.filtered)


class _Plan:
    """Parameters of a set of rows. Those of torch's draw are tensors on the device of the logits."""

    def __init__(self, rows: Sequence[Row], logits: Tensor, *, fused: bool) -> None:
        vocab = logits.shape[-1]
        self._adjustments, self._masks = Adjustments(rows), Masks(rows, logits)
        self.parameters = Parameters(rows, vocab) if fused else None
        drawn = [] if fused else [i for i, row in enumerate(rows) if row.sampling.temperature > 0]
        split = [[i for i in drawn if has_filter(rows[i].sampling, vocab) is asked] for asked in (False, True)]
        self.groups = [_Group(part, rows, logits) for part in split if part]
        self.with_logprobs = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
        self.with_margins = any(row.with_margin for row in rows)
        self.greedy = not (self.with_logprobs or any(row.sampling.temperature > 0 for row in rows))

    def adjust(self, logits: Tensor) -> Tensor:
        """Return the logits after penalties, bias, bans and constraints; the same tensor if no row has any."""
        scores = self._adjustments.apply(logits)
        return self._masks.apply(scores, fresh=scores is not logits) if self._masks else scores


def _drawn(plan: _Plan, rows: Sequence[Row], scores: Tensor) -> Tensor:
    """Return torch's draw: token ids or NO_NUMBER, int64 `[rows]`."""
    best, tokens = _best(scores)
    for group in plan.groups:
        tokens[group.index] = group.draw(scores, best)
    # NaN counts as the greatest number, so `best` has any NaN of its row.
    tokens = tokens.where(best.isfinite(), NO_NUMBER)
    if unsure := (tokens == UNSURE).nonzero()[:, 0].tolist():
        again = _Group(unsure, rows, scores)
        tokens[again.index] = again.draw_from_all(scores, best)
    return tokens


class _Group:
    """Rows that are drawn in the same way: all with filters, or all without."""

    def __init__(self, places: list[int], rows: Sequence[Row], logits: Tensor) -> None:
        device, vocab = logits.device, logits.shape[-1]
        self._rows = [rows[i] for i in places]
        samplings = [row.sampling for row in self._rows]
        self.index = torch.tensor(places, device=device)
        self._all = len(places) == len(rows)
        temperatures = [[max(s.temperature, FINITE.tiny)] for s in samplings]
        self._temperature = torch.tensor(temperatures, dtype=torch.float32, device=device)
        self._columns = torch.arange(vocab, dtype=torch.int32, device=device)
        self._limits = Limits.of(samplings, vocab, device) if has_filter(samplings[0], vocab) else None

    def draw(self, scores: Tensor, best: Tensor) -> Tensor:
        """Return token ids, int64 `[group]`, from the adjusted logits of all rows and their best; or UNSURE."""
        if self._limits is None or scores.shape[-1] <= 2 * GROUPS * LANES:
            return self.draw_from_all(scores, best)
        scaled = self._scale(scores, best)
        total = mass(scaled) if self._limits.has_top_p else None
        found = leaders(scaled)
        allowed, sure = kept_leaders(found, self._limits, total)
        noisy = gumbel(self._keys(scaled), found.columns).add_(found.values).masked_fill_(~allowed, NEVER)
        place = _best(noisy)[1][:, None]
        return found.columns.gather(-1, place)[:, 0].long().where(sure, UNSURE)

    def draw_from_all(self, scores: Tensor, best: Tensor) -> Tensor:
        """Return the same by definition, from all columns of the vocabulary."""
        scaled = self._scale(scores, best)
        on_cpu = scaled.device.type == "cpu"  # elsewhere parts cost launches and save nothing
        keys, step = self._keys(scaled), max(1, CACHED_COLUMNS // scaled.shape[-1]) if on_cpu else len(scaled)
        parts = (slice(i, i + step) for i in range(0, len(scaled), step))
        return torch.cat([self._draw_part(scaled[part], keys[part], part) for part in parts])

    def _draw_part(self, scaled: Tensor, keys: Tensor, part: slice) -> Tensor:
        noisy = gumbel(keys, self._columns).add_(scaled)
        if self._limits is not None:
            noisy.masked_fill_(~kept(scaled, self._limits.part(part)), NEVER)
        return _best(noisy)[1]

    def _scale(self, scores: Tensor, best: Tensor) -> Tensor:
        if not self._all:
            scores, best = scores.index_select(0, self.index), best.index_select(0, self.index)
        # Subtract the best first, so that a tiny temperature gives 0 and -inf, never inf - inf.
        return (scores - best[:, None]).div_(self._temperature)

    def _keys(self, like: Tensor) -> Tensor:
        return torch.tensor([row.noise_key for row in self._rows], dtype=torch.int32, device=like.device)


def gumbel(keys: Tensor, columns: Tensor) -> Tensor:
    """Return Gumbel noise, float32 `[rows, n]`, for int32 `keys` `[rows, 2]` and `columns` `[n]` or `[rows, n]`."""
    # A winner has a small uniform variate. Floats are finest there, so 31 bits suffice.
    uniform = columns_hash(keys, columns).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _greedy(scores: Tensor, *, margins: bool) -> list[Sampled]:
    """Return the best token of each row. It uses numpy, because calls are most of a step's overhead."""
    array = scores.numpy()
    rows, columns = np.arange(len(array)), array.argmax(axis=-1)
    best = array[rows, columns]
    leads: Iterator[float] = repeat(math.inf)
    if margins:
        array[rows, columns] = -math.inf  # for a moment: the maximum of the rest costs less than a copy
        leads = iter((best - array.max(axis=-1)).tolist())
        array[rows, columns] = best
    found = zip(columns.tolist(), np.isfinite(best).tolist(), leads, strict=False)
    return [Sampled(token if good else None, None, lead) for token, good, lead in found]


def _best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best value of each row, and the lowest column that has it."""
    if scores.device.type != "cpu":
        return scores.max(dim=-1)
    columns = torch.from_numpy(scores.numpy().argmax(axis=-1))  # vectorised and ten times as fast as torch's
    return scores.gather(-1, columns[:, None])[:, 0], columns


def _logprobs(logits: Tensor, tokens: Tensor, wanted: list[int], rows: Sequence[Row]) -> dict[int, TokenLogprobs]:
    if not wanted:
        return {}
    raw = log_softmax(logits[wanted])
    chosen = raw.gather(-1, tokens[wanted, None].clamp(min=0))[:, 0].tolist()  # a row without a token has logprobs too
    best = _most_likely(raw, [rows[i].sampling.logprobs or 0 for i in wanted])
    return {i: TokenLogprobs(*found) for i, *found in zip(wanted, chosen, best, strict=True)}


def _most_likely(raw: Tensor, counts: list[int]) -> list[tuple[tuple[int, float], ...]]:
    """Return the `counts` best tokens of the rows of `raw` `[rows, vocab]`. Among equal values at the edge, torch
    takes any. The edge is that of the largest count. So they are looked up: a row must not depend on other rows.
    """
    best, found = raw.topk(min(max(counts) + 1, raw.shape[-1]), dim=-1), []
    for row, count, values, ids in zip(raw, counts, best.values.tolist(), best.indices.tolist(), strict=True):
        if 0 < count < len(values) and values[count - 1] == values[-1]:
            within = (row >= values[-1]).nonzero()[:, 0]
            found.append(ranked(row[within].tolist(), within.tolist())[:count])
        else:
            found.append(ranked(values, ids)[:count])
    return found


def ranked(values: list[float], ids: list[int]) -> tuple[tuple[int, float], ...]:
    """Return tokens with their log-probabilities, best first; among equal ones, the lowest id first."""
    return tuple(sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0])))
