"""From logits to tokens, all rows of a step at once, each row as if it were alone.

Per row, in this order: repetition penalty (prompt and output), frequency and presence penalty (output), logit bias,
ban of end tokens before `min_tokens`; then greedy, or temperature, min-p, top-k, top-p and a draw. The draw is
Gumbel-max with noise hashed from (seed, position in the sequence, column): there is no generator whose state could
depend on other rows, and a sequence that goes on elsewhere goes on with the same noise.

Ties go to the lowest token id, in the argmax as in the filters. Log-probabilities are those of the model: the
log-softmax of the logits before all of the above.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from baton.core import TokenLogprobs
from baton.engine.mixing import GOLDEN64, columns_hash, mix64, signed32

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from baton.core import Sampling

NEVER = float("-inf")
FINITE = torch.finfo(torch.float32)


class Sampled(NamedTuple):
    """A drawn token; `token_id` None if none can be drawn: the best logit is not a finite number."""

    token_id: int | None
    logprobs: TokenLogprobs | None


class Row:
    """What the next draw of one sequence depends on beside the logits: its parameters and its tokens so far."""

    def __init__(self, prompt: Sequence[int], sampling: Sampling, end_ids: Iterable[int], vocab_size: int) -> None:
        self.sampling = sampling
        self.end_ids = sorted({token for token in end_ids if token < vocab_size})
        self.position = len(prompt)
        self.produced = 0
        self.seen: Tensor | None = None  # bool [vocab]: in prompt or output
        self.counts: Tensor | None = None  # float32 [vocab]: times in output
        self._noise_start = mix64((sampling.seed or 0) + GOLDEN64)
        if has_penalties(sampling):
            self.seen = torch.zeros(vocab_size, dtype=torch.bool)
            self.seen[list(prompt)] = True
            self.counts = torch.zeros(vocab_size)

    def advance(self, token_id: int) -> None:
        """The sequence has one more output token."""
        self.position += 1
        self.produced += 1
        if self.seen is not None and self.counts is not None:
            self.seen[token_id] = True
            self.counts[token_id] += 1

    @property
    def noise_key(self) -> tuple[int, int]:
        """Two int32 for the noise of the token at `position` of the sequence."""
        key = mix64(self._noise_start + self.position * GOLDEN64)
        return signed32(key), signed32(key >> 32)


def has_penalties(sampling: Sampling) -> bool:
    """Whether the tokens so far change the logits."""
    return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[Row]) -> list[Sampled]:
    """Draw one token for each row of `logits` (float32 `[len(rows), vocab]`, left as it is)."""
    scores = adjust(logits, rows)
    best, tokens = scores.max(dim=-1)
    drawn = _where(rows, lambda row: row.sampling.temperature > 0)
    if drawn:
        tokens[drawn] = draw(scores[drawn], [rows[i] for i in drawn])
    # max() takes a NaN for the greatest number, so one that is anywhere in a row is found in `best`
    chosen = [token if good else None for token, good in zip(tokens.tolist(), best.isfinite().tolist(), strict=True)]
    logprobs = _logprobs(logits, tokens, rows)
    return [Sampled(token, logprobs.get(i)) for i, token in enumerate(chosen)]


def adjust(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits `[rows, vocab]` after penalties, bias and bans; a copy wherever a row asks for any of them."""
    penalised = _where(rows, lambda row: row.seen is not None)
    biased = _where(rows, lambda row: bool(row.sampling.logit_bias))
    barred = _where(rows, lambda row: row.produced < row.sampling.min_tokens)
    if not (penalised or biased or barred):
        return logits
    logits = logits.clone()
    if penalised:
        logits[penalised] = _penalise(logits[penalised], [rows[i] for i in penalised])
    for i in biased:
        ids, biases = zip(*rows[i].sampling.logit_bias, strict=True)
        logits[i, list(ids)] += torch.tensor(biases, device=logits.device)
    for i in barred:
        logits[i, rows[i].end_ids] = NEVER
    return logits


def draw(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Sample each row of adjusted logits: token ids, int64 `[rows]`."""
    scaled = filter_tokens(_scale(logits, rows), rows)
    return (scaled + gumbel([row.noise_key for row in rows], logits)).argmax(dim=-1)


def gumbel(keys: Sequence[tuple[int, int]], like: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, of the shape and on the device of `like` `[len(keys), vocab]`.

    The winner has a small exponential variate, hence a small uniform one: floats are finest there, and 31 bits
    suffice for any vocabulary.
    """
    bits = columns_hash(torch.tensor(keys, dtype=torch.int32, device=like.device), like.shape[-1])
    uniform = ((bits.float() + 0.5) * 2.0**-31).clamp_(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def filter_tokens(scaled: Tensor, rows: Sequence[Row]) -> Tensor:
    """`scaled` logits `[rows, vocab]`, best at 0, with -inf where min-p, then top-k, then top-p rule a token out."""
    vocab = scaled.shape[-1]
    if any(row.sampling.min_p > 0 for row in rows):
        floor = _column([row.sampling.min_p for row in rows], scaled).log()
        scaled = scaled.masked_fill(scaled < floor, NEVER)
    if some := _where(rows, lambda row: 0 < row.sampling.top_k < vocab):
        scaled[some] = _top_k(scaled[some], [rows[i].sampling.top_k for i in some])
    if some := _where(rows, lambda row: row.sampling.top_p < 1):
        scaled[some] = _top_p(scaled[some], [rows[i].sampling.top_p for i in some])
    return scaled


def _where(rows: Sequence[Row], wanted: Callable[[Row], bool]) -> list[int]:
    return [i for i, row in enumerate(rows) if wanted(row)]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _scale(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    # Minus the best first: a tiny temperature then gives 0 and -inf, never inf - inf.
    best = logits.max(dim=-1, keepdim=True).values
    return (logits - best) / _column([max(row.sampling.temperature, FINITE.tiny) for row in rows], logits)


def _penalise(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    seen = torch.stack([row.seen for row in rows if row.seen is not None]).to(logits.device)
    counts = torch.stack([row.counts for row in rows if row.counts is not None]).to(logits.device)
    repetition = _column([max(row.sampling.repetition_penalty, FINITE.tiny) for row in rows], logits)
    frequency = _column([row.sampling.frequency_penalty for row in rows], logits)
    presence = _column([row.sampling.presence_penalty for row in rows], logits)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    adjusted = torch.where(seen, repeated, logits) - frequency * counts - presence * (counts > 0)
    return adjusted.clamp(FINITE.min, FINITE.max)  # a tiny penalty must not make a logit infinite


def _top_k(scaled: Tensor, ks: Sequence[int]) -> Tensor:
    """Keep the k best of each row; of equal ones at the edge, those with the lowest ids."""
    k = torch.tensor(ks, device=scaled.device)[:, None]
    edge = scaled.topk(max(ks), dim=-1).values.gather(-1, k - 1)
    above, at = scaled > edge, scaled == edge
    places = k - above.sum(dim=-1, keepdim=True)
    return scaled.masked_fill(~(above | (at & (at.cumsum(dim=-1) <= places))), NEVER)


def _top_p(scaled: Tensor, ps: Sequence[float]) -> Tensor:
    """Keep the fewest best tokens of each row whose probabilities reach p."""
    ranked, order = scaled.sort(dim=-1, descending=True, stable=True)
    probabilities = ranked.double().softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    dropped = before >= torch.tensor(ps, dtype=torch.float64, device=scaled.device)[:, None]
    return scaled.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), NEVER)


def _logprobs(logits: Tensor, tokens: Tensor, rows: Sequence[Row]) -> dict[int, TokenLogprobs]:
    wanted = _where(rows, lambda row: row.sampling.logprobs is not None)
    if not wanted:
        return {}
    raw = logits[wanted].log_softmax(dim=-1)
    chosen = raw.gather(-1, tokens[wanted][:, None])[:, 0].tolist()
    best = raw.topk(min(max(rows[i].sampling.logprobs or 0 for i in wanted), raw.shape[-1]), dim=-1)
    found = zip(wanted, chosen, best.values.tolist(), best.indices.tolist(), strict=True)
    return {i: TokenLogprobs(logprob, _ranked(rows[i], values, ids)) for i, logprob, values, ids in found}


def _ranked(row: Row, values: list[float], ids: list[int]) -> tuple[tuple[int, float], ...]:
    ranked = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple(ranked[: row.sampling.logprobs or 0])
