"""Decode steps with proposals, and their exact acceptance.

    rows of a sequence:  last known token | proposal 1 | proposal 2 | ...
    draws:               token a          | token b    | token c    |      a is right; b if a is proposal 1; ...

Noise is keyed by seed and position, so a draw does not depend on the step that makes it. The draws up to the first one
that differs from its proposal are those of single steps. `Speculation.take` pushes them one after the other, with the
same penalties, constraints, stops and ends. KV behind them stays uncommitted, and later steps overwrite it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from time import monotonic

import structlog
import torch
from torch import Tensor

from baton.core import HandoffId, Token
from baton.engine.determinism.planner import ExactForwards
from baton.engine.determinism.verifier import FixedForwards, VerifiedTokens
from baton.engine.kernels.select import fused_draw
from baton.engine.kv_cache import KVCache
from baton.engine.model_backend import ModelBackend
from baton.engine.model_runner import OrdinaryForwards
from baton.engine.request import Request
from baton.engine.sampling.logits import Row
from baton.engine.sampling.prompt_logprobs import scores_of
from baton.engine.sampling.sampler import Sampled, Sampler
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import LayerListener, ScheduledSequence
from baton.engine.speculation.control import ProposalControl, Speculating
from baton.engine.speculation.proposer import Proposer
from baton.engine.step_result import Counters, StepResult

log = structlog.get_logger()
MOST = 15  # proposals of a sequence in a step
MEASURED = 16  # of so many steps without proposals, one is measured


@dataclass(slots=True)
class SpeculationOptions:
    """Drafter and shapes of an engine's speculative steps. In steps of up to `rows` rows, a row has the same bits as
    alone: in any forward, or in fixed ones if `fixed`. `exact_rows` is that of `FixedShapes`.
    Deterministic requests take part if `deterministic`: rows of fixed forwards have equal bits, too.
    """

    proposer: Proposer
    rows: int
    fixed: bool = False
    exact_rows: int = 0
    control: ProposalControl = field(default_factory=ProposalControl)
    deterministic: bool = True


class Speculation:
    """Speculative steps of one engine. Each has one forward, for all of its work or for none."""

    def __init__(
        self,
        ordinary: OrdinaryForwards,
        scheduler: Scheduler,
        backend: ModelBackend,
        options: SpeculationOptions,
        fixed: FixedForwards | None = None,
    ) -> None:
        if fixed is not None and options.proposer.cheap:
            fixed.propose = self.candidates
        self._inputs, self._sampler, self._scheduler = ordinary.inputs, ordinary.sampler, scheduler
        self._backend, self._options = backend, options
        self._broken = False  # the drafter failed; it is not asked again
        self._idle = 0  # steps without proposals since the last one with some
        self._single = Sampler(fused_draw(backend.device))  # for rows that depend on the draw before

    def takes(self, work: Sequence[ScheduledSequence], requests: Mapping[HandoffId, Request]) -> bool:
        """Propose for `work` and return whether it is a step of this kind: one token of each sequence, with equal bits
        in any company. Most steps without proposals are ordinary ones, which take less time on the host.
        """
        if not 0 < len(work) <= self._options.rows or any(item.count > 1 or not item.completes for item in work):
            return False
        found = [requests[item.sequence.key] for item in work]
        if not self._options.deterministic and any(map(_is_deterministic, found)):
            return False
        if len(work) > self._options.exact_rows and any(each.progress is not None for each in found):
            return False
        if not all(each.is_final(exact=True) and scores_of(each.sequence) is None for each in found):
            return False
        if not self._broken:
            self._try(partial(self._propose, work, found))
        if self._broken:
            for item, request in zip(work, found, strict=True):
                item.count, request.speculating = 1, None
        self._idle = 0 if any(item.count > 1 for item in work) else self._idle + 1
        follows = self._options.proposer.follows and not self._broken
        return self._options.fixed or follows or self._idle % MEASURED == 0

    @torch.inference_mode()
    def compute(
        self,
        work: Sequence[ScheduledSequence],
        requests: Sequence[Request],
        kv: KVCache,
        on_layer: LayerListener | None,
    ) -> list[Draws]:
        """Run the model and return draws for each sequence, after `takes`."""
        began = monotonic()
        listener = partial(on_layer, list(work)) if on_layer is not None else None
        fixed = self._options.fixed or any(map(_is_deterministic, requests))
        with _extended(requests):
            tokens = [request.tokens for request in requests]
            batch = self._inputs.build(work, tokens, listener, fixed=fixed, every_row=True)
        logits = self._backend.forward(batch, kv)
        if self._options.proposer.follows and not self._broken:
            sources = [self._begun(request).source for request in requests]
            self._try(partial(self._options.proposer.computed, sources, [item.count for item in work]))
        found = self._draws(work, requests, logits)
        self._options.control.note_step(sum(item.count for item in work), monotonic() - began)
        return found

    def count(self, work: Sequence[ScheduledSequence], result: StepResult, counters: Counters) -> None:
        """Count the cost of a step, which includes rejected proposals. Only accepted ones count as decoded tokens."""
        proposed = sum(item.count - 1 for item in work)
        counters.count(list(work), result)
        counters.decode_tokens -= proposed
        counters.speculated_tokens += proposed

    def take(
        self, item: ScheduledSequence, request: Request, draws: Draws, counters: Counters
    ) -> VerifiedTokens | None:
        """Push draws to the choice up to the first that is no proposal. Return None if none can be drawn."""
        choice, sequence, before = request.choice, item.sequence, item.sequence.computed
        proposal, tokens, accepted = _proposal_of(request), list[Token](), 0
        for number in range(item.count):
            sampled = draws[number]
            if sampled.token_id is None:
                break  # behind the first draw: the next step fails, with all tokens before it delivered
            token = choice.push(sampled.token_id, sampled.logprobs)
            sequence.computed, sequence.known = sequence.computed + 1, len(choice.tokens)
            if token is not None:
                tokens.append(token)
                request.confirm()
            if choice.finish is not None or number == len(proposal) or sampled.token_id != proposal[number]:
                break
            accepted += 1
        self._note(request, accepted, counters)
        return VerifiedTokens(tokens, before) if sequence.computed > before else None

    def candidates(self, request: Request, most: int) -> list[int]:
        """Return up to `most` proposals behind the verified tokens of a request, for its next verify pass. It must have
        no candidates. The pass draws each token again, so proposals are as safe as the draws of ordinary steps.
        """
        found: list[int] = []
        if not self._broken:
            self._try(lambda: found.extend(self._candidates(request, most)))
        return found

    def _candidates(self, request: Request, most: int) -> list[int]:
        state, control, tokens = self._begun(request), self._options.control, request.choice.tokens
        if known := tokens[state.base : state.base + len(state.candidates)]:
            pairs = zip(known, state.candidates, strict=False)
            right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            state.acceptance.note(len(known), right)
            control.overall.note(len(known), right)
        state.base, state.candidates = len(tokens), []
        count = state.source.available(min(most, _limit(request)))
        if count > 0 and control.pays(state.acceptance):
            state.candidates = self._options.proposer.propose([state.source], [count])[0]
        return state.candidates

    def _try(self, propose: Callable[[], None]) -> None:
        """Run the drafter. If it fails, the engine goes on without proposals."""
        try:
            propose()
        except Exception:
            log.exception("drafter_failed")
            self._broken = True

    def _note(self, request: Request, accepted: int, counters: Counters) -> None:
        state = request.speculating
        counters.accepted_tokens += accepted
        counters.decode_tokens += accepted
        if state is not None and state.proposal:
            state.acceptance.note(len(state.proposal), accepted)
            self._options.control.overall.note(len(state.proposal), accepted)
            state.proposal = []

    # --- proposals -----------------------------------------------------------------------------------------------

    def _propose(self, work: Sequence[ScheduledSequence], requests: Sequence[Request]) -> None:
        """Set the proposals of each request, and the counts of `work` with them."""
        options = self._options
        states, spare = [self._begun(request) for request in requests], options.rows - len(work)
        if not spare:
            return
        options.proposer.read([state.source for state in states])
        began = monotonic()
        limits = [_limit(request) for request in requests]
        possible = [s.source.available(most) if most > 0 else 0 for s, most in zip(states, limits, strict=True)]
        counts = options.control.counts([state.acceptance for state in states], possible, spare)
        chosen = [(item, state) for item, state, count in zip(work, states, counts, strict=True) if count]
        if not chosen:
            return
        rooms = [self._room(item, count) for item, count in zip(work, counts, strict=True) if count]
        wanted = [(item, state, room) for (item, state), room in zip(chosen, rooms, strict=True) if room]
        found = options.proposer.propose([state.source for _, state, _ in wanted], [room for *_, room in wanted])
        for (item, state, _), proposal in zip(wanted, found, strict=True):
            state.proposal, item.count = proposal, 1 + len(proposal)
        options.control.note_drafter(sum(map(len, found)), monotonic() - began)

    def _begun(self, request: Request) -> Speculating:
        if request.speculating is None:
            request.speculating = Speculating(self._options.proposer.begin(request.choice.tokens, request.choice.row))
        return request.speculating

    def _room(self, item: ScheduledSequence, count: int) -> int:
        """Return how many of `count` proposals the blocks of a sequence can hold. Adds blocks only if enough remain for
        as many tokens of each running sequence, so that proposals delay and preempt none.
        """
        sequence, scheduler = item.sequence, self._scheduler
        allocation, size, pool = sequence.allocation, scheduler.block_size, scheduler.pool
        assert allocation is not None
        missing = -(-(sequence.known + count) // size) - len(allocation)
        spare = scheduler.watermark + len(scheduler.running) * -(-MOST // size)
        if missing > 0 and pool.available - missing >= spare:
            before = len(allocation)
            allocation.grow(missing)
            pool.history.blocks("owned", sequence.key, allocation, before)
        return min(count, len(allocation) * size - sequence.known)

    # --- draws ---------------------------------------------------------------------------------------------------

    def _draws(self, work: Sequence[ScheduledSequence], requests: Sequence[Request], logits: Tensor) -> list[Draws]:
        """Return the draws of each sequence. Those with a state that follows from the position are made together, and
        so are the first draws of all others.
        """
        rows, places, found, at = list[Row](), list[int](), list[Draws](), 0
        for item, request in zip(work, requests, strict=True):
            row, most = request.choice.row, item.count
            count = most if most == 1 or _follows_from_position(row) else 1
            found.append(Draws(self._single, row, logits, at, count))
            rows += [row.at(ahead) for ahead in range(count)] if count > 1 else [row]
            places += range(at, at + count)
            at += most
        drawn = iter(self._sampler.sample(logits if len(places) == at else logits[places], rows))
        for draws in found:
            draws.ready = list(islice(drawn, draws.together))
        return found


class Draws:
    """Tokens behind the rows of one sequence, from row `at` of the logits on, one after the other. The first `together`
    are `ready`.
    """

    __slots__ = ("_at", "_logits", "_row", "_sampler", "ready", "together")

    def __init__(self, sampler: Sampler, row: Row, logits: Tensor, at: int, together: int) -> None:
        self._sampler, self._row, self._logits, self._at = sampler, row, logits, at
        self.together = together
        self.ready: list[Sampled] = []

    def __getitem__(self, number: int) -> Sampled:
        """Return a draw. All draws before it must have been pushed to the choice."""
        if number < len(self.ready):
            return self.ready[number]
        at = self._at + number
        return self._sampler.sample(self._logits[at : at + 1], [self._row])[0]


def _limit(request: Request) -> int:
    """Return how many proposals a request can use: it ends by its length, or stops for a move, one token later."""
    row, choice = request.choice.row, request.choice
    left = choice.max_output - row.produced
    if request.hold:
        left = min(left, request.hold - len(choice.tokens))
    return min(left - 1, MOST)


def _proposal_of(request: Request) -> list[int]:
    return request.speculating.proposal if request.speculating is not None else []


def _is_deterministic(request: Request) -> bool:
    return request.progress is not None or request.sequence.policy(ExactForwards) is not None


def _follows_from_position(row: Row) -> bool:
    """Return whether the state of later draws depends on positions, but not on tokens."""
    return row.seen is None and row.guide is None and not row.bad_words


@contextmanager
def _extended(requests: Sequence[Request]) -> Iterator[None]:
    """Add the proposals to the tokens while the batch is built. A copy of long sequences would take longer."""
    ends = [len(request.tokens) for request in requests]
    try:
        for request in requests:
            request.tokens.extend(_proposal_of(request))
        yield
    finally:
        for request, end in zip(requests, ends, strict=True):
            del request.tokens[end:]
