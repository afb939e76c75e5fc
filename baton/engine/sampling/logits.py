"""Changes of single logits before a draw: penalties, bias and bans (`Adjustments`), and constraints (`Masks`).
Adjustments are sparse: the affected tokens of all rows are concatenated, so a step gathers, computes and scatters once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from baton.core import Sampling
from baton.engine.sampling.noise import GOLDEN64, mix64, signed32
from baton.structured_output import Guide

Array = np.ndarray[Any, np.dtype[Any]]
NEVER = float("-inf")
FINITE = torch.finfo(torch.float32)
_ALIGNED = 4  # floats: on a GPU, the order of torch's sums (SoftMax.cu) depends on a row's place within 16 bytes


class Seen:
    """Distinct tokens of a prompt and its output, and the count of each in the output."""

    def __init__(self, prompt: Iterable[int]) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._ids = np.array(list(self._places), dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)

    def add(self, token_id: int) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            more = np.zeros(place + 16, dtype=np.int64)
            self._ids, self._counts = np.append(self._ids, more), np.append(self._counts, more.astype(np.float32))
        self._ids[place] = token_id
        self._counts[place] += 1

    def copy(self) -> Seen:
        other = Seen(())
        other._places = dict(self._places)
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        return other

    @property
    def ids(self) -> Array:
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> Array:
        return self._counts[: len(self._places)]


class Row:
    """Inputs of a sequence's next draw besides the logits: its parameters, and its tokens so far."""

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        end_ids: Iterable[int],
        vocab_size: int,
        guide: Guide | None,
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        self.sampling, self.guide = sampling, guide
        self.bad_words, self._kept = bad_words, max(map(len, bad_words), default=1) - 1
        self._recent: tuple[int, ...] = ()  # last tokens of the output, as many as bad words need
        self.end_ids = np.array(sorted({token for token in end_ids if token < vocab_size}), dtype=np.int64)
        self.position, self.produced = len(prompt), 0
        penalties = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
        self.seen = None if penalties == (1.0, 0.0, 0.0) else Seen(prompt)
        self.with_margin = False  # whether draws have the lead of the best logit
        self.noise_start = mix64((sampling.seed or 0) + GOLDEN64)

    def advance(self, token_id: int) -> None:
        self.position += 1
        self.produced += 1
        if self.seen is not None:
            self.seen.add(token_id)
        if self.guide is not None:
            self.guide.advance(token_id)
        if self._kept:
            self._recent = (*self._recent, token_id)[-self._kept :]

    @property
    def bars(self) -> bool:
        """Whether `barred` may have tokens for this draw."""
        return bool(self.bad_words) or self.produced < self.sampling.min_tokens

    @property
    def barred(self) -> Array:
        """The tokens that must not be drawn next, int64: end tokens before `min_tokens`, and ends of bad words."""
        recent = self._recent
        ends = [word[-1] for word in self.bad_words if word[:-1] == recent[len(recent) + 1 - len(word) :]]
        found = np.array(ends, dtype=np.int64)
        return np.concatenate([found, self.end_ids]) if self.produced < self.sampling.min_tokens else found

    def copy(self) -> Row:
        other = self.at(0)
        other.seen = None if self.seen is None else self.seen.copy()
        other.guide = None if self.guide is None else self.guide.copy()
        return other

    def at(self, ahead: int) -> Row:
        """Return the row `ahead` tokens later. Only without penalties, guide and bad words: it ignores which tokens."""
        other = copy(self)
        other.position += ahead
        other.produced += ahead
        return other

    @property
    def noise_key(self) -> tuple[int, int]:
        """Two int32 that key the noise at `position` of the sequence."""
        key = mix64(self.noise_start + self.position * GOLDEN64)
        return signed32(key), signed32(key >> 32)


class Adjustments:
    """Adjustments of one set of rows, applied step by step."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._penalised = [(i, row.seen, row.sampling) for i, row in enumerate(rows) if row.seen is not None]
        samplings = [sampling for _, _, sampling in self._penalised]
        rates = [(max(s.repetition_penalty, FINITE.tiny), s.frequency_penalty, s.presence_penalty) for s in samplings]
        self._rates = np.array(rates, dtype=np.float32).T
        biases = [(i, *pair) for i, row in enumerate(rows) for pair in row.sampling.logit_bias]
        self._biases = [np.array(column) for column in zip(*biases, strict=True)]
        self._barring = [(i, row) for i, row in enumerate(rows) if row.bars]

    def apply(self, logits: Tensor) -> Tensor:
        """Return logits `[rows, vocab]` after penalties, then bias, then bans; a copy if any row needs one of them."""
        self._barring = [(i, row) for i, row in self._barring if row.bars]
        if not (self._penalised or self._biases or self._barring):
            return logits
        vocab = logits.shape[-1]
        flat = logits.flatten().clone() if logits.is_contiguous() else logits.flatten()
        if self._penalised:
            self._penalise(flat, vocab)
        if self._biases:
            rows, ids, values = self._biases
            places = upload(rows * vocab + ids, flat.device)
            flat[places] += upload(values.astype(np.float32), flat.device)
        if self._barring:
            flat[upload(np.concatenate([row.barred + i * vocab for i, row in self._barring]), flat.device)] = NEVER
        return flat.view_as(logits)

    def _penalise(self, flat: Tensor, vocab: int) -> None:
        places = upload(np.concatenate([seen.ids + i * vocab for i, seen, _ in self._penalised]), flat.device)
        counts = upload(np.concatenate([seen.counts for _, seen, _ in self._penalised]), flat.device)
        sizes = [len(seen.ids) for _, seen, _ in self._penalised]
        repetition, frequency, presence = (upload(rates.repeat(sizes), flat.device) for rates in self._rates)
        logits = flat.index_select(0, places)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        adjusted = repeated - frequency * counts - presence * (counts > 0)
        adjusted.clamp_(FINITE.min, FINITE.max)  # a tiny penalty must not make a logit infinite
        flat.index_copy_(0, places, adjusted)


def log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities of `logits`, both float32 `[rows, vocab]`. No row's bits depend on its place."""
    vocab = logits.shape[-1]
    if logits.device.type != "cpu" and vocab % _ALIGNED:
        logits = pad(logits, (0, -vocab % _ALIGNED), value=NEVER)
    return logits.log_softmax(dim=-1)[:, :vocab]


def upload(array: Array, device: torch.device) -> Tensor:
    """Return `array` on the device. On a CPU it shares the memory; a copy to a GPU is not waited for."""
    staged = torch.from_numpy(array)
    return (staged.pin_memory() if device.type == "cuda" else staged).to(device, non_blocking=True)


class Masks:
    """Constraints of some rows, applied step by step; false if there are none. Buffers are reused, for speed."""

    def __init__(self, rows: Sequence[Row], logits: Tensor) -> None:
        self._guided = [(place, row.guide) for place, row in enumerate(rows) if row.guide is not None]
        if not self._guided:
            return
        words = max(-(-logits.shape[-1] // 32), *(guide.words for _, guide in self._guided))
        self._bits = np.zeros((len(self._guided), words), dtype=np.int32)
        self._places = upload(np.array([place for place, _ in self._guided]), logits.device)
        self._addends = _addends().to(logits.device)
        self._scores = torch.empty_like(logits)

    def __bool__(self) -> bool:
        return bool(self._guided)

    def apply(self, scores: Tensor, *, fresh: bool) -> Tensor:
        """Return `scores` `[rows, vocab]` with NEVER for each disallowed token; in place if they are `fresh`."""
        for (_, guide), allowed in zip(self._guided, self._bits, strict=True):
            guide.fill(allowed[: guide.words])
        bits = upload(self._bits.view(np.uint8), scores.device).int()
        added = embedding(bits, self._addends).flatten(1)[:, : scores.shape[-1]]
        masked = scores if fresh else self._scores.copy_(scores)
        return masked.index_add_(0, self._places, added)  # unlike masked_fill_, equally fast for every pattern


def _addends() -> Tensor:
    """Return the addends of eight logits for each byte of a mask: float32 `[256, 8]`."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits, 0.0, NEVER).astype(np.float32))
