"""The engine of a worker: sequences in, tokens out, one `step` at a time. Used by one thread.

    submit ──> waiting ──> running ──> finished           blocks are freed
                 ^            │  └───> held               hold=True: blocks stay until release
                 └─preempted──┤
    adopt ────────────────────┘        (or preempted, dropped and reported)

There are no phases: prompt chunks, decoding and recomputation all raise the computed tokens towards the known ones. A
step runs the ordinary batch, then a verify pass or grid chunks for deterministic requests (`verifier.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as TokenSequence
from functools import partial
from typing import TypeVar

import structlog

from baton.core import Finish, HandoffId, Load, SequenceSpec, SequenceState
from baton.engine.block_pool import Allocation, BlockPool, Reservation
from baton.engine.determinism.planner import forwards_of, split_exact
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.determinism.verifier import FixedForwards, VerifiedTokens
from baton.engine.model_backend import ModelBackend, is_device_lost
from baton.engine.model_runner import Inputs, OrdinaryForwards, SampledToken
from baton.engine.overlap import Overlap
from baton.engine.request import Request, RequestFactory
from baton.engine.sampling.output import OutputFactory
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import LayerListener, ScheduledSequence, SchedulerOutput, Sequence
from baton.engine.speculation.forwards import Speculation, SpeculationOptions
from baton.engine.speculation.own_forwards import OwnForwards, OwnWork
from baton.engine.states import States
from baton.engine.step_result import Counters, SequenceOutput, StepResult
from baton.engine.thinking import Thoughts
from baton.errors import EngineFault, RankLost
from baton.structured_output import Guide
from baton.tokenizer import Tokenizer

_Result = TypeVar("_Result")
_Work = TypeVar("_Work", bound=OwnWork)
_Draws = TypeVar("_Draws")
NO_TOKEN = "no token can be sampled: the largest logit is not a finite number"
BROKEN = "no token can be sampled: the constraint became too complex"
log = structlog.get_logger()


class Engine:
    """One model, its KV cache and its requests. A sequence ends at `max_model_len` tokens (None: the model's limit), or
    where it would not fit into the pool alone. `max_batched_tokens` and `max_running` limit a step's tokens and
    sequences. Preempted sequences start over here if `recompute_preempted`; else they are dropped and reported.
    `prefix_cache` keeps KV of full blocks for the same `cache_scope` while it has room. `shapes` enables deterministic
    requests; None rejects them. `overlap` launches decode steps before the last tokens are on the host (`overlap.py`);
    None means on a GPU. `exposed` KV can be read by other processes of this host. Up to `state_slots` sequences, twice
    `max_running` by default, have a state of recurrent layers; these exclude `speculation`, as thoughts and overlap do.
    """

    def __init__(  # noqa: PLR0913  (all but three have a default)
        self,
        backend: ModelBackend,
        tokenizer: Tokenizer,
        *,
        total_blocks: int,
        max_model_len: int | None = None,
        max_batched_tokens: int = 2048,
        max_running: int = 64,
        recompute_preempted: bool = True,
        prefix_cache: bool = True,
        shapes: FixedShapes | None = None,
        overlap: bool | None = None,
        exposed: bool = False,
        state_slots: int | None = None,
        speculation: SpeculationOptions | None = None,
    ) -> None:
        self.backend, self.layout, self.tokenizer = backend, backend.layout, tokenizer
        self.kv = backend.make_cache(total_blocks + bool(shapes), exposed=exposed)  # one more block is for padding
        slots = (state_slots or 2 * max_running) if self.layout.state_size else None
        generations = None if self.kv.exposed is None else self.kv.exposed.generations
        self.pool = BlockPool(total_blocks, generations, slots=slots)
        self.counters, self._prefix_cache = Counters(), prefix_cache
        longest = min(backend.max_model_len, total_blocks * self.layout.block_size)
        self.max_model_len = min(longest, max_model_len or longest)
        self._scheduler = Scheduler(
            self.pool,
            self.layout.block_size,
            max_batched_tokens=max_batched_tokens,
            max_running=max_running,
            recompute_preempted=recompute_preempted,
        )
        max_blocks = self.layout.blocks_for(self.max_model_len)
        self._thoughts = None if backend.thinker is None else Thoughts(backend.thinker, total_blocks)
        self._states = None if slots is None else States(self.kv, slots, slots * prefix_cache)
        self.inputs = Inputs(backend, max_batched_tokens, max_running, max_blocks)
        keepers = self._thoughts, self._states
        self._ordinary = OrdinaryForwards(self.inputs, *keepers)
        self._fixed = FixedForwards(backend, shapes, max_blocks, total_blocks, *keepers) if shapes else None
        choices = OutputFactory(tokenizer, backend.vocab_size, self.max_model_len)
        begin = self._fixed.begin if self._fixed else None
        self._factory = RequestFactory(backend, choices, begin, *keepers, prefix_cache)
        forwards, self._exact_rows = (self._ordinary, self._scheduler, backend), shapes.exact_rows if shapes else 0
        self._speculation = None if speculation is None else Speculation(*forwards, speculation, self._fixed)
        self._requests: dict[HandoffId, Request] = {}
        self._ended: list[SequenceOutput] = []  # ended by known tokens; reported by the next step
        early = backend.device.type == "cuda" if overlap is None else overlap
        steps = self._ordinary, self._scheduler, self._requests, self._compute, self._deliver
        self._overlap = Overlap(*steps, enabled=early and self._thoughts is None)
        self._on_layer: LayerListener | None = None

    def watch(self, on_layer: LayerListener | None, on_free: Callable[[Sequence], None]) -> None:
        """Register listeners. Each step calls `on_layer` during the forward, layer by layer, once K and V are written.
        `on_free` receives each sequence before its blocks are freed; nothing may read them after it returns.
        """
        self._on_layer, self._scheduler.on_free = on_layer, on_free

    def reserve(self, tokens: int, prefix: TokenSequence[bytes] = ()) -> Reservation | None:
        """Reserve blocks for the KV of `tokens` positions and one more, or return None if they are not available now.
        `prefix` has the first block hashes. Cached blocks need no transfer, but the last position always does.
        """
        hashes = prefix[: (tokens - 1) // self.layout.block_size] if self._prefix_cache else ()
        return Reservation.of(self.pool, self.layout, tokens + 1, hashes, self._scheduler.watermark)

    def submit(self, key: HandoffId, spec: SequenceSpec, *, hold: bool = False) -> TokenSequence[int]:
        """Compute `spec` from its first token. If `hold`, stop after one new token and keep the blocks for `held`.
        Returns a growing list of tokens. Raises InvalidRequest if that is impossible, ValueError if `key` is in use.
        """
        self.validate(spec)
        self._check_new(key)
        if (request := self._registered(self._factory.begin(key, spec, hold=hold))) is not None:
            self._scheduler.add(request.sequence)
        return request.choice.tokens if request is not None else ()

    def adopt(
        self, key: HandoffId, spec: SequenceSpec, reservation: Reservation, state: SequenceState | None = None
    ) -> TokenSequence[int]:
        """Continue a sequence with KV in `reservation` (from `reserve`) of all tokens but the last, which was delivered
        elsewhere. Returns a growing list of tokens. The engine then owns the reservation, or the caller if this raises
        InvalidRequest like `submit`, or ValueError: it is used or too small, `state` does not fit, `key` is in use.
        """
        self.validate(spec)
        reservation.check(self.pool, self.layout.blocks_for(len(spec) - 1))
        self._check_new(key)
        request, allocation = self._registered(self._factory.adopt(key, spec, state)), reservation.activate()
        if request is None:
            self.pool.history.blocks("let_go", key, allocation)
            allocation.release()
            return ()
        request.sequence.allocation = allocation
        self._scheduler.adopt(request.sequence, reservation.cached_tokens)
        return request.choice.tokens

    def rename(self, key: HandoffId, new: HandoffId) -> None:
        """Rename the request `key`, in any state. Raises KeyError if it is unknown, ValueError if `new` is in use."""
        if new in self._requests:
            raise ValueError(f"handoff {new} is already in use")
        self._requests[new] = self._requests.pop(key)
        self._requests[new].sequence.key = new

    def land(self) -> StepResult:
        """Return the outputs of the step under way, if there is one, and of requests that have just ended."""
        result, self._ended = StepResult(outputs=self._ended), []
        landed = self._overlap.under_way
        self._overlap.land(result)
        if landed is not None:
            result.add_counts(landed.counts)
        return result

    def halt(self, key: HandoffId, ahead: int = 0) -> tuple[TokenSequence[int], Allocation] | None:
        """Stop a decoding sequence, now or after `ahead` more tokens, and keep its blocks for `held`. Call `land`
        before. Returns its delivered tokens and its blocks, which grow until then. Returns None, and the sequence
        continues, if the KV of all tokens but the last is not final here.
        """
        if (request := self._requests.get(key)) is None or request.held or request.sequence.allocation is None:
            return None
        final = request.sequence.computed if request.progress is None else request.progress.final
        if final < len(request.choice.tokens) - 1:
            return None
        request.hold = len(request.choice.tokens) + ahead
        if not ahead:
            request.held = True
            self._scheduler.remove(request.sequence)
        return request.choice.tokens, request.sequence.allocation

    def state_of(self, key: HandoffId) -> SequenceState | None:
        """Return what a sequence needs besides its KV, or None if the model keeps nothing else. Raises KeyError."""
        keeper = self._thoughts or self._states
        return None if keeper is None else keeper.state(self._requests[key].sequence)

    def held(self, key: HandoffId) -> Allocation:
        """Return the blocks with the KV of a held sequence's spec. Raises KeyError if `key` is not held."""
        if not (request := self._requests[key]).held or request.sequence.allocation is None:
            raise KeyError(key)
        return request.sequence.allocation

    def holdings(self) -> Iterator[tuple[HandoffId, Allocation | None]]:
        """Yield the key of each request with its blocks, or None before it has started."""
        yield from ((key, request.sequence.allocation) for key, request in self._requests.items())
        yield from self._overlap.holdings()

    def release(self, key: HandoffId) -> None:
        """Remove a request in any state and free its blocks, unless they are in quarantine. Ignores an unknown key."""
        self._ended = [output for output in self._ended if output.key != key]
        if (request := self._requests.pop(key, None)) is not None:
            self._scheduler.remove(request.sequence)
            self._overlap.free(request.sequence)

    def finish_of(self, spec: SequenceSpec) -> Finish | None:
        """Return how `spec.known` already ends the request, or None. Raises InvalidRequest like `submit`."""
        self.validate(spec)
        return self._factory.choices.start(spec).finish

    def validate(self, spec: SequenceSpec) -> None:
        """Raise InvalidRequest, naming the field, if `spec` can never be computed here."""
        self._factory.check(spec)

    def has_work(self) -> bool:
        """Return whether a step could produce anything. Held sequences need no step."""
        return bool(self._scheduler.running or self._scheduler.waiting or self._ended or self._overlap.under_way)

    def load(self) -> Load:
        running, waiting = self._scheduler.running, self._scheduler.waiting
        queued = sum(max(0, s.prefill_end - s.computed) for s in running) + self._scheduler.waiting_tokens
        return self.counters.load(len(running), len(waiting), queued, self.pool.counts())

    def step(self) -> StepResult:
        result, self._ended = StepResult(outputs=self._ended), []
        landed = self._overlap.under_way  # before this step ends
        if landed is not None and not self._scheduler.keeps_all():
            self._overlap.land(result)  # preemption needs all tokens
        plan = self._scheduler.schedule()
        self.counters.preemptions += len(plan.preempted)
        self.counters.cached_tokens += plan.cached_tokens
        for sequence in plan.preempted:
            if self._scheduler.recompute_preempted:
                self._requests[sequence.key].start_over()
            else:
                del self._requests[sequence.key]
                result.preempted.append(sequence.key)
        if self._overlap.fits(plan):
            self._overlap.run(plan.work, self.backend, self.kv, self._on_layer, self.counters, result)
        else:
            self._overlap.land(result)
            self._run_plan(plan, result)
        if landed is not None:
            result.add_counts(landed.counts)
        return result

    def _run_plan(self, plan: SchedulerOutput, result: StepResult) -> None:
        work = [w for w in plan.work if (r := self._requests.get(w.sequence.key)) and not r.held]  # not just ended
        if self._speculation and self._speculation.takes(work, self._requests):
            self._run_own(self._speculation, work, result)
        elif work:
            self._run(work, result)
        if self._fixed is not None:
            for windows in forwards_of(plan.windows, self._requests):
                self._run_own(self._fixed, windows, result)

    def _run(self, work: list[ScheduledSequence], result: StepResult) -> None:
        done, drawn = list[ScheduledSequence](), list[SampledToken]()
        for part in split_exact(work, self._exact_rows):
            requests = [self._requests[item.sequence.key] for item in part.work]
            compute = partial(self._ordinary.compute, part, requests, self.backend, self.kv, self._on_layer)
            sampled = self._compute(compute, [item.sequence for item in part.work], result)
            if sampled is not None:
                done += part.work
                drawn += sampled
        if done:
            self.counters.count(done, result)
            self._scheduler.commit_step(done)
            result.add_thoughts(item.sequence for item in done)
            for each in drawn:
                self._deliver(each, result)

    def _run_own(self, own: OwnForwards[_Work, _Draws], work: list[_Work], result: StepResult) -> None:
        requests = [self._requests[item.sequence.key] for item in work]
        sequences = [request.sequence for request in requests]
        drawn = self._compute(lambda: own.compute(work, requests, self.kv, self._on_layer), sequences, result)
        if drawn is not None:
            own.count(work, result, self.counters)
            for item, request, draws in zip(work, requests, drawn, strict=bool(drawn)):
                self._settle(request, own.take(item, request, draws, self.counters), result)
            result.add_thoughts(sequences)

    def _compute(self, compute: Callable[[], _Result], sequences: list[Sequence], result: StepResult) -> _Result | None:
        """Return the result of a forward, or None if it failed. Its requests then fail, but no others."""
        try:
            return compute()
        except Exception as error:
            if isinstance(error, RankLost) or is_device_lost(error):
                raise  # without the rank or the GPU, no request can be computed
            log.exception("engine_step_failed", sequences=len(sequences))
            for sequence in sequences:
                self._fail(sequence.key, f"{type(error).__name__}: {error}", result)
            return None

    def _deliver(self, each: SampledToken, result: StepResult) -> None:
        request, drawn = each.request, each.sampled
        if not each.final:
            return request.push_candidate(drawn)
        if drawn.token_id is None:
            return self._fail(request.sequence.key, NO_TOKEN, result, request.row.guide)
        choice, sequence = request.choice, request.sequence
        token = choice.push(drawn.token_id, drawn.logprobs)
        sequence.known = max(sequence.known, len(choice.tokens))  # a launched step may already count its token
        if token is not None:
            request.confirm()
        tokens = [] if token is None else [token]
        result.outputs.append(SequenceOutput(sequence.key, tokens, choice.finish, sequence.cached or 0))
        self._hold_or_release(request)

    def _hold_or_release(self, request: Request) -> None:
        finish = request.choice.finish
        full = len(request.choice.tokens) >= request.hold and not request.replays
        if request.hold and (finish is not None or full):
            request.held = True
            self._scheduler.remove(request.sequence)
        elif finish is not None:
            self.release(request.sequence.key)

    def _settle(self, request: Request, taken: VerifiedTokens | None, result: StepResult) -> None:
        sequence, finish = request.sequence, request.choice.finish
        if taken is None:
            return self._fail(sequence.key, NO_TOKEN, result, request.choice.row.guide)
        self._scheduler.publish(sequence, taken.before)
        if taken.tokens or finish is not None:
            result.outputs.append(SequenceOutput(sequence.key, taken.tokens, finish, sequence.cached or 0))
            self._hold_or_release(request)

    def _fail(self, key: HandoffId, message: str, result: StepResult, guide: Guide | None = None) -> None:
        sequence = self._requests[key].sequence
        if guide is not None and guide.broken:
            message = BROKEN  # and the KV is right
        elif sequence.allocation is not None:
            sequence.allocation.withdraw()  # its KV may be wrong and must not be reused
            if self._states is not None:
                self._states.forget(sequence)
        self.release(key)
        result.failed.append((key, EngineFault(message)))

    def _check_new(self, key: HandoffId) -> None:
        if key in self._requests or any(output.key == key for output in self._ended):
            raise ValueError(f"handoff {key} is already in use")

    def _registered(self, created: Request | SequenceOutput) -> Request | None:
        if isinstance(created, SequenceOutput):
            self._ended.append(created)
            return None
        self._requests[created.sequence.key] = created
        return created
