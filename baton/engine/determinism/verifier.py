"""Fixed forwards: prompts of deterministic requests on the grid, and verify passes over their candidates.

A verify pass computes the last verified token and the candidates behind it. It overwrites the ordinary batch's KV and
draws each next token again: equal candidates stay, the first different one is replaced, later ones are dropped. Padding
fills the shape; its results are never read. It writes behind the known tokens, or to one spare block of the cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.core import Token
from baton.engine.batch import Batch, StateRows
from baton.engine.determinism.planner import ExactForwards, VerifiedProgress, progress_of
from baton.engine.determinism.shapes import CandidateTokens, FixedShapes
from baton.engine.kernels.select import fused_draw
from baton.engine.kv_cache import KVCache
from baton.engine.memory.staging import Staged
from baton.engine.model_backend import ModelBackend
from baton.engine.request import Request
from baton.engine.sampling.logits import Row
from baton.engine.sampling.output import OutputState
from baton.engine.sampling.prompt_logprobs import scores_of
from baton.engine.sampling.sampler import Sampled, Sampler
from baton.engine.sequence import LayerListener, ScheduledSequence, VerifyWork
from baton.engine.states import States
from baton.engine.step_result import Counters, StepResult
from baton.engine.thinking import Thoughts

# Returns at most so many tokens that may follow the verified ones of a request.
Propose = Callable[[Request, int], Sequence[int]]


class VerifiedTokens(NamedTuple):
    """Result of a pass for one sequence: verified tokens, and the number of KV positions that were final before."""

    tokens: list[Token]
    before: int


class FixedInputs:
    """Builder of fixed batches. Padding is written to block `spare`. Sequences have up to `max_blocks` blocks."""

    def __init__(self, backend: ModelBackend, shapes: FixedShapes, max_blocks: int, spare: int) -> None:
        self._shapes, self._block_size, self._spare = shapes, backend.layout.block_size, spare
        self._last = backend.max_model_len - 1
        width = max_blocks + backend.layout.blocks_for(shapes.largest)
        tokens, rows = (torch.int64, (shapes.largest,)), shapes.most + 1  # the last one is for padding
        self._staged = Staged(
            backend.device,
            staged=backend.device.type != "cpu",
            token_ids=tokens,
            positions=tokens,
            slots=tokens,
            wanted=tokens,
            starts=(torch.int32, (rows + 1,)),
            lens=(torch.int32, (rows,)),
            tables=(torch.int32, (rows, width)),
        )

    def build(
        self,
        windows: Sequence[VerifyWork],
        tokens: Sequence[list[int]],
        on_layer: Callable[[int], None] | None = None,
        thoughts: Thoughts | None = None,
        states: StateRows | None = None,
    ) -> Batch:
        """Build the batch of one pass's windows; `tokens[i]` are those of its i-th sequence. Valid until the next
        build. Logits are wanted for the last token of a prompt that ends here, or for all rows of a verify pass or of
        a prompt that is scored.
        """
        on_grid = windows[0].on_grid
        n = windows[0].size if on_grid else self._shapes.total
        lengths = [window.size for window in windows] + self._spare_rows(n - sum(window.size for window in windows))
        rows, starts = len(lengths), [0, *accumulate(lengths)]
        contexts = [window.start + window.size for window in windows] + lengths[len(windows) :]
        arrays, tensors = self._staged.arrays, self._staged.tensors
        arrays["tables"][:rows] = self._spare
        arrays["token_ids"][:n] = 0
        arrays["slots"][:n] = self._spare * self._block_size
        arrays["positions"][:n] = np.concatenate([np.arange(length) for length in lengths]).clip(max=self._last)
        for row, (window, known) in enumerate(zip(windows, tokens, strict=True)):
            self._write(row, starts[row], window, known)
        arrays["starts"][: rows + 1] = starts
        arrays["lens"][:rows] = contexts
        wanted = n
        if on_grid and scores_of(windows[0].sequence) is None:
            arrays["wanted"][0] = windows[0].count - 1
            wanted = int(windows[0].start + windows[0].count == progress_of(windows[0].sequence).verified)
        else:
            arrays["wanted"][:n] = np.arange(n)
        self._staged.push()
        return Batch(
            token_ids=tensors["token_ids"][:n],
            positions=tensors["positions"][:n],
            slot_mapping=tensors["slots"][:n],
            query_lens=lengths,
            context_lens=contexts,
            query_starts=tensors["starts"][: rows + 1],
            kv_lens=tensors["lens"][:rows],
            block_tables=tensors["tables"][:rows],
            logit_rows=tensors["wanted"][:wanted],
            on_layer=on_layer,
            fixed=True,
            thinking=None if thoughts is None else thoughts.inject_fixed(windows, n),
            states=states,
        )

    def _spare_rows(self, missing: int) -> list[int]:
        """Return the lengths of rows of padding: one if windows have any lengths, else those of absent windows."""
        if self._shapes.ragged:
            return [missing] if missing else []
        return [self._shapes.tokens] * (missing // self._shapes.tokens)

    def _write(self, row: int, at: int, window: VerifyWork, known: list[int]) -> None:
        assert window.sequence.allocation is not None
        size, start = window.size, window.start
        blocks, arrays = window.sequence.allocation.blocks, self._staged.arrays
        table, slots = arrays["tables"][row], arrays["slots"]
        table[: len(blocks)] = blocks
        positions = np.arange(start, start + size)
        arrays["positions"][at : at + size] = positions.clip(max=self._last)
        arrays["token_ids"][at : at + window.count] = known[start : start + window.count]
        # Padding also overwrites the rest of its own blocks: attention reads them with weight 0, but 0 * NaN is NaN.
        places = positions[: len(blocks) * self._block_size - start]
        own = slice(at, at + len(places))
        slots[own] = table[places // self._block_size].astype(np.int64) * self._block_size
        slots[own] += places % self._block_size


class FixedForwards:
    """Fixed forwards of one engine: their building, computation and evaluation."""

    def __init__(
        self,
        backend: ModelBackend,
        shapes: FixedShapes,
        max_blocks: int,
        spare: int,
        thoughts: Thoughts | None = None,
        states: States | None = None,
    ) -> None:
        self._backend, self._shapes, self._thoughts, self._states = backend, shapes, thoughts, states
        self._everywhere = shapes.everywhere and thoughts is None  # reading thoughts is not a product of integers
        self._inputs = FixedInputs(backend, shapes, max_blocks, spare)
        self._sampler = Sampler(fused_draw(backend.device))
        self._began = 0.0  # start of the last forward
        self.propose: Propose | None = None  # source of tokens that fill passes; whatever it returns, answers are equal

    def begin(self, request: Request, prompt: int) -> None:
        sequence = request.sequence
        if self._everywhere:
            sequence.policies = (*sequence.policies, ExactForwards())
            return
        progress = VerifiedProgress(self._shapes, prompt, sequence.known, sequence.computed, holds=bool(request.hold))
        sequence.policies = (*sequence.policies, progress)
        request.progress, request.draft = progress, CandidateTokens(request.choice)

    @torch.inference_mode()
    def compute(
        self, windows: list[VerifyWork], requests: Sequence[Request], kv: KVCache, on_layer: LayerListener | None
    ) -> list[VerifySamples]:
        """Run the model and return draws per window; none if a new thought makes a grid chunk run again. `windows` with
        proposals get longer.
        """
        self._began = time.monotonic()
        if self._shapes.ragged and not windows[0].on_grid:
            self._fill(windows, requests)
        work = [ScheduledSequence(window.sequence, window.count) for window in windows]
        listener = partial(on_layer, work) if on_layer is not None else None
        states = None if self._states is None else self._states.fixed(windows)
        tokens = [request.tokens for request in requests]
        batch = self._inputs.build(windows, tokens, listener, self._thoughts, states)
        logits = self._backend.forward(batch, kv)
        if (scores := scores_of(windows[0].sequence)) is not None:
            scores.take(logits[: windows[0].count], windows[0].start)
        thoughts, injected = self._thoughts, batch.thinking
        if thoughts is not None and injected is not None and not thoughts.settle_fixed(windows[0], injected):
            return []
        return self._draws(windows, requests, logits)

    def _fill(self, windows: list[VerifyWork], requests: Sequence[Request]) -> None:
        """Take proposals as candidates while the pass and the blocks of their sequence have room."""
        left = self._shapes.total - sum(window.size for window in windows)
        for number, (window, request) in enumerate(zip(windows, requests, strict=True)):
            draft, end = request.draft, window.start + window.count
            assert draft is not None
            room = min(left, self._room(window, draft))
            if draft.proposals and end == len(draft.tokens) and (more := draft.take_proposals(room)):
                windows[number] = replace(window, count=window.count + more, size=window.size + more)
                left -= more

    def _room(self, window: VerifyWork, draft: CandidateTokens) -> int:
        """Return how many more tokens the blocks of a sequence can hold."""
        assert window.sequence.allocation is not None
        return len(window.sequence.allocation.blocks) * self._backend.layout.block_size - len(draft.tokens)

    def count(self, windows: Sequence[VerifyWork], result: StepResult, counters: Counters) -> None:
        """Count the cost of a forward, but not its results."""
        on_grid = windows[0].on_grid
        tokens = windows[0].size if on_grid else self._shapes.total
        result.computed += tokens
        result.prefill += tokens * on_grid
        context = sum(w.size * w.start + w.size * (w.size + 1) // 2 for w in windows)
        result.context += context
        result.prefill_context += context * on_grid
        counters.steps += result.computed == tokens  # unless the ordinary batch counted it
        counters.prefill_tokens += sum(ScheduledSequence(w.sequence, w.count).prefill_tokens for w in windows)
        counters.verify_passes += not on_grid
        for window in () if on_grid else windows:
            verifying = progress_of(window.sequence).verifying
            verifying.passes += 1
            verifying.seconds += time.monotonic() - self._began
            result.verifying.append((window.sequence.key, verifying))

    def _draws(self, windows: Sequence[VerifyWork], requests: Sequence[Request], logits: Tensor) -> list[VerifySamples]:
        """Return draws for each window. Rows with a state that follows from the position alone are drawn together."""
        pairs = zip(windows, requests, strict=True)
        found = [VerifySamples(self._sampler, window, request) for window, request in pairs]
        rows, places, begin = [], list[int](), 0
        for window, draws in zip(windows, found, strict=True):
            at, begin = begin if len(logits) > 1 else -draws.first, begin + window.size
            draws.logits = logits[at + draws.first : at + draws.last] if draws.last > draws.first else logits[:0]
            if draws.plain:
                rows += draws.rows()
                places += range(at + draws.first, at + draws.last)
        if rows:
            drawn = iter(self._sampler.sample(logits if len(places) == len(logits) else logits[places], rows))
            for draws in found:
                if draws.plain:
                    draws.ready = [next(drawn) for _ in range(draws.last - draws.first)]
        return found

    def take(
        self, window: VerifyWork, request: Request, draws: VerifySamples, counters: Counters
    ) -> VerifiedTokens | None:
        """Push draws with right inputs to the choice; move the draft behind them. Return None if the first cannot be
        drawn. If a later one cannot, the next pass begins there, and fails with all tokens before it delivered.
        """
        choice, draft, fixed = request.choice, request.draft, progress_of(window.sequence)
        assert draft is not None
        tokens, final, agrees, drawn = list[Token](), window.start + window.count, True, draft.drawn
        for number in range(draws.last - draws.first):
            sampled = draws[number]
            if sampled.token_id is None:
                if not tokens:
                    return None
                break
            final = window.start + draws.first + number + 1
            agrees = _agrees(draft, final, sampled.token_id, choice)
            token = choice.push(sampled.token_id, sampled.logprobs)
            tokens += [token] if token is not None else []
            if choice.finish is not None or not agrees:
                break
        wrong = not agrees and (final < drawn or draft.stopped)  # a wrong proposal costs nothing
        counters.rollbacks += wrong
        fixed.verifying.rollbacks += wrong
        if choice.finish is None and agrees and tokens and len(choice.tokens) > len(draft.tokens):
            draft.push(choice.tokens[-1])  # the additional one, behind candidates that were all right
        elif choice.finish is not None or not agrees:
            counters.recomputed_tokens += max(0, drawn - final - agrees)
            draft = request.draft = CandidateTokens(choice)
        if tokens and choice.finish is None and len(draft.tokens) == len(choice.tokens):
            draft.proposals = self._proposed(request, draft)
        fixed.verified, fixed.ended = len(choice.tokens), draft.ended
        final = final if self._states is None else self._states.settle(window, final)
        fixed.proposed, fixed.margin = min(len(draft.proposals), max(self._room(window, draft), 0)), math.inf
        before, fixed.final, fixed.waited = fixed.final, final, 0
        window.sequence.computed, window.sequence.known = final, len(draft.tokens)
        return VerifiedTokens(tokens, before)

    def _proposed(self, request: Request, draft: CandidateTokens) -> list[int]:
        """Return proposals if passes can take some: they take none behind constraints."""
        if self.propose is None or not self._shapes.ragged or draft.row.guide is not None:
            return []
        return list(self.propose(request, self._shapes.tokens - 1))


class VerifySamples:
    """Tokens that follow the inputs [first, last) of one window, one after the other."""

    def __init__(self, sampler: Sampler, window: VerifyWork, request: Request) -> None:
        self.first = min(progress_of(window.sequence).verified - 1 - window.start, window.count)
        self.last, self.row = window.count, request.choice.row
        self.plain = self.row.seen is None and self.row.guide is None and not self.row.bad_words
        self.ready: list[Sampled] = []
        self.logits: Tensor
        self._sampler = sampler

    def rows(self) -> list[Row]:
        """Return the row of each draw. Those of a greedy one are equal, unless tokens are barred at the beginning."""
        count = self.last - self.first
        if self.row.sampling.temperature == 0 and not self.row.bars:
            return [self.row] * count
        return [self.row.at(ahead) for ahead in range(count)]

    def __getitem__(self, number: int) -> Sampled:
        """Return a draw. All draws before it must have been pushed to the choice."""
        if self.plain:
            return self.ready[number]
        return self._sampler.sample(self.logits[number : number + 1], [self.row])[0]


def _agrees(draft: CandidateTokens, position: int, token_id: int, choice: OutputState) -> bool:
    """Return whether the candidate at `position`, if any, is this token. An end agrees with an end."""
    if position < len(draft.tokens):
        return draft.tokens[position] == token_id
    return not draft.stopped or choice.ends_by_id(token_id) is not None
