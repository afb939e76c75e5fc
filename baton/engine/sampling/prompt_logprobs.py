"""Log-probabilities of prompt tokens: the part of a prompt's computation that needs logits at every position.

Logits of a whole prompt do not fit into memory. A forward that scores has one such sequence and at most `ROWS` of its
positions, and its results leave with the step.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf

import torch
from torch import Tensor

from baton.core import PromptPart, PromptToken, TokenLogprobs
from baton.engine.sampling.logits import log_softmax
from baton.engine.sampling.sampler import ranked
from baton.engine.sequence import UNLIMITED, Sequence, SequencePolicy

ROWS = 128  # positions of an ordinary forward; those on the grid of a deterministic prompt have up to 256
_SLICE = 32  # rows whose log-softmax is computed together


class PromptScores(SequencePolicy):
    """The log-probabilities of one sequence's prompt, with the `top` most likely tokens of each position. Logits of all
    positions but the last are needed, so none of these comes from the prefix cache. A preempted sequence continues
    after the positions that it has reported.
    """

    __slots__ = ("_new", "_prompt", "_top", "done")

    def __init__(self, prompt: ListOf[int], top: int) -> None:
        self._prompt, self._top = prompt, top
        self.done = 0  # leading positions whose logits were used
        self._new: list[PromptPart] = []

    @property
    def complete(self) -> bool:
        return self.done >= len(self._prompt) - 1

    def most(self, computed: int) -> int:
        return UNLIMITED if self.complete else ROWS

    @property
    def cacheable(self) -> int:
        return UNLIMITED if self.complete else self.done

    def take(self, logits: Tensor, start: int) -> None:
        """Score the tokens after the positions from `start` on: float32 `[positions, vocab]`, left unchanged."""
        first = max(self.done, start)
        end = min(start + len(logits), len(self._prompt) - 1)
        tokens = list[PromptToken]()
        for at in range(first, end, _SLICE):
            until = min(at + _SLICE, end)
            tokens += _scored(logits[at - start : until - start], self._prompt[at + 1 : until + 1], self._top)
        if tokens:
            self._new.append(PromptPart(first + 1, tuple(tokens)))
            self.done = end

    def new_prompt_parts(self) -> list[PromptPart]:
        new, self._new = self._new, []
        return new


def scores_of(sequence: Sequence) -> PromptScores | None:
    """Return the scores that the next forward of `sequence` extends, or None if it needs no logits for them."""
    found = sequence.policy(PromptScores) if sequence.policies else None
    return None if found is None or found.complete else found


def _scored(logits: Tensor, tokens: ListOf[int], top: int) -> list[PromptToken]:
    raw = log_softmax(logits)
    chosen = raw.gather(-1, torch.tensor(tokens, device=raw.device)[:, None])
    ranks = (raw > chosen).sum(dim=-1) + 1
    best = raw.topk(min(top, raw.shape[-1]), dim=-1)
    alternatives = map(ranked, best.values.tolist(), best.indices.tolist())
    found = map(TokenLogprobs, chosen[:, 0].tolist(), alternatives)
    return list(map(PromptToken, tokens, ranks.tolist(), found))
