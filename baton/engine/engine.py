"""The engine of a worker: sequences in, tokens out, one `step` at a time. Used by one thread.

    submit ──> waiting ──> running ──> finished           blocks freed here
                 ^            │  └───> held               hold=True: blocks stay until release
                 └─preempted──┤
    adopt ────────────────────┘        (or preempted and handed back)

Progress is counted, not phased: every kind of work (prompt chunks, decoding, starting over after a preemption or
elsewhere) is to let computed tokens catch up with known ones. A step runs the ordinary batch, and then, for
deterministic requests, one forward of a fixed shape (`baton.engine.determinism.verifier`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

import structlog

from baton.engine.block_pool import BlockPool, Reservation
from baton.engine.choice import OutputFactory
from baton.engine.determinism.shapes import split_exact
from baton.engine.determinism.verifier import FixedForwards
from baton.engine.model_runner import Inputs, OrdinaryForwards
from baton.engine.request import RequestFactory
from baton.engine.scheduler import Scheduler
from baton.engine.step_result import Counters, SequenceOutput, StepResult, load_of
from baton.engine.thinking.states import Thoughts
from baton.errors import EngineFault, RankLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Sequence as TokenSequence

    from baton.core import Finish, HandoffId, Load, SequenceSpec, ThinkingState
    from baton.engine.block_pool import Allocation
    from baton.engine.determinism.planner import VerifyWork
    from baton.engine.determinism.shapes import FixedShapes
    from baton.engine.determinism.verifier import VerifiedTokens
    from baton.engine.model_backend import ModelBackend
    from baton.engine.model_runner import SampledToken
    from baton.engine.request import Request
    from baton.engine.sequence import ScheduledSequence, Sequence
    from baton.tokenizer import Tokenizer

    LayerListener = Callable[
        [list[ScheduledSequence], int], None
    ]  # the work of a step; a layer whose K and V are written for it

_Found = TypeVar("_Found")
NO_TOKEN = "no token can be drawn: the best logit is not a finite number"
log = structlog.get_logger()


class Engine:
    """One model, its KV cache, and the requests that use them.

    A sequence ends at `max_model_len` tokens (None: the model's), and where it would not fit the pool alone.
    `max_batched_tokens` bounds a step's tokens, `max_running` its sequences. `recompute_preempted`: start them over
    here, or hand them back through `StepResult.preempted`. `prefix_cache`: keep the KV of full blocks while there is
    room, for others of a `cache_scope`. `shapes`: for deterministic requests; None: these are refused.
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
    ) -> None:
        self.backend, self.layout, self.tokenizer = backend, backend.layout, tokenizer
        self.pool = BlockPool(total_blocks)
        self.kv = backend.make_cache(total_blocks + (shapes is not None))  # the last one is nobody's
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
        self._thoughts = None if backend.thinker is None else Thoughts(backend.thinker, self.layout)
        self._ordinary = OrdinaryForwards(Inputs(backend, max_batched_tokens, max_running, max_blocks), self._thoughts)
        self._fixed = FixedForwards(backend, shapes, max_blocks, total_blocks, self._thoughts) if shapes else None
        choices = OutputFactory(tokenizer, backend.vocab_size, self.max_model_len)
        self._beginnings = RequestFactory(backend, choices, self._fixed, self._thoughts, prefix_cache)
        self._exact_rows = shapes.exact_rows if shapes else 0
        self._requests: dict[HandoffId, Request] = {}
        self._ended: list[SequenceOutput] = []  # ended by what was known already; told with the next step
        self._on_layer: LayerListener | None = None

    def watch(self, on_layer: LayerListener, on_free: Callable[[Sequence], None]) -> None:
        """Have `on_layer` told, in the middle of each step, what is computed layer by layer, and `on_free` of each
        sequence whose blocks are about to be let go: when it returns, nobody may read them any more.
        """
        self._on_layer, self._scheduler.on_free = on_layer, on_free

    def reserve(self, tokens: int, prefix: TokenSequence[bytes] = ()) -> Reservation | None:
        """Room for the KV of `tokens` positions and one more, or None: not now.

        `prefix` names the sequence's first full blocks: those that are in the cache need not come, but for the last
        position, which always does. Leaves a block for each running sequence, and room for the next that waits here.
        """
        names = prefix[: (tokens - 1) // self.layout.block_size] if self._prefix_cache else ()
        return Reservation.of(self.pool, self.layout, tokens + 1, names, self._scheduler.watermark)

    def submit(self, key: HandoffId, spec: SequenceSpec, *, hold: bool = False) -> TokenSequence[int]:
        """Compute `spec` from its first token on. `hold`: stop after one new token and keep the blocks for `held`.

        Returns its tokens, which grow. Raises InvalidRequest if it can never be, ValueError if `key` is in use.
        """
        self.validate(spec)
        self._check_new(key)
        if (request := self._registered(self._beginnings.begin(key, spec, hold=hold))) is not None:
            self._scheduler.add(request.sequence)
        return request.choice.tokens if request is not None else ()

    def adopt(
        self, key: HandoffId, spec: SequenceSpec, reservation: Reservation, thinking: ThinkingState | None = None
    ) -> TokenSequence[int]:
        """Go on with a sequence whose KV, but for its last token, lies in `reservation` (from `reserve`). Returns its
        tokens, which grow. The last of `spec.known` was delivered elsewhere. `thinking`: of a model that thinks.

        The reservation is the engine's from here on. Raises ValueError if it is used already or too small, for a wrong
        `thinking` or a `key` in use, and InvalidRequest like `submit`; it is the caller's then.
        """
        self.validate(spec)
        reservation.check(self.pool, self.layout.blocks_for(len(spec) - 1))
        self._check_new(key)
        begun = self._beginnings.adopt(key, spec, thinking)
        request, allocation = self._registered(begun), reservation.activate()
        if request is None:
            self.pool.history.blocks("let_go", key, allocation)
            allocation.release()
            return ()
        request.sequence.allocation = allocation
        self._scheduler.adopt(request.sequence, reservation.cached_tokens)
        return request.choice.tokens

    def rename(self, key: HandoffId, new: HandoffId) -> None:
        """From now on the request `key` is `new`, in whatever state. Raises KeyError or ValueError for wrong ones."""
        if new in self._requests:
            raise ValueError(f"handoff {new} is already here")
        self._requests[new] = self._requests.pop(key)
        self._requests[new].sequence.key = new

    def thinking_state(self, key: HandoffId) -> ThinkingState | None:
        """What a held sequence's KV goes with; None: the model does not think. Raises KeyError for an unknown one."""
        return None if self._thoughts is None else self._thoughts.state(self._requests[key].sequence)

    def held(self, key: HandoffId) -> Allocation:
        """Blocks with the KV of all tokens of a held sequence's spec. Raises KeyError if `key` is not held."""
        if not (request := self._requests[key]).held or request.sequence.allocation is None:
            raise KeyError(key)
        return request.sequence.allocation

    def holdings(self) -> Iterator[tuple[HandoffId, Allocation | None]]:
        """Each request here with its blocks; none: it has not begun."""
        return ((key, request.sequence.allocation) for key, request in self._requests.items())

    def release(self, key: HandoffId) -> None:
        """Forget a request in whatever state and free its blocks, unless they are in quarantine. Unknown: no-op."""
        self._ended = [output for output in self._ended if output.key != key]
        if (request := self._requests.pop(key, None)) is not None:
            self._scheduler.remove(request.sequence)
            self._scheduler.free(request.sequence)

    def finish_of(self, spec: SequenceSpec) -> Finish | None:
        """How `spec.known` ends its request already, if it does. Raises InvalidRequest like `submit`."""
        self.validate(spec)
        return self._beginnings.choices.start(spec).finish

    def validate(self, spec: SequenceSpec) -> None:
        """Raises InvalidRequest, naming the field, if `spec` can never be computed here."""
        self._beginnings.check(spec)

    def has_work(self) -> bool:
        """Whether a step could bring anything. Held sequences wait for others, not for a step."""
        return bool(self._scheduler.running or self._scheduler.waiting or self._ended)

    def load(self) -> Load:
        """Its part of what a worker reports."""
        return load_of(self._scheduler, self.counters)

    def step(self) -> StepResult:
        """Schedule, compute, and tell what came of it."""
        result, self._ended = StepResult(outputs=self._ended), []
        plan = self._scheduler.schedule()
        self.counters.preemptions += len(plan.preempted)
        self.counters.cached_tokens += plan.cached_tokens
        for sequence in plan.preempted:
            if self._scheduler.recompute_preempted:
                self._requests[sequence.key].start_over()
            else:
                del self._requests[sequence.key]
                result.preempted.append(sequence.key)
        if plan.work:
            self._run(plan.work, result)
        if windows := [window for window in plan.windows if window.sequence.key in self._requests]:  # not just failed
            self._run_fixed(windows, result)
        return result

    def _run(self, work: list[ScheduledSequence], result: StepResult) -> None:
        done: list[ScheduledSequence] = []
        drawn: list[SampledToken] = []
        for part in split_exact(work, self._exact_rows):
            requests = [self._requests[item.sequence.key] for item in part.work]
            compute = partial(self._ordinary.compute, part, requests, self.backend, self.kv, self._on_layer)
            sampled = self._tried(compute, [item.sequence for item in part.work], result)
            if sampled is not None:
                done += part.work
                drawn += sampled
        if done:
            self.counters.count(done, result)
            self._scheduler.commit_step(done)
            result.tell_thoughts(item.sequence for item in done)
            for each in drawn:
                self._deliver(each, result)

    def _run_fixed(self, windows: list[VerifyWork], result: StepResult) -> None:
        assert self._fixed is not None
        fixed, requests = self._fixed, [self._requests[window.sequence.key] for window in windows]
        sequences = [request.sequence for request in requests]
        drawn = self._tried(lambda: fixed.compute(windows, requests, self.kv, self._on_layer), sequences, result)
        if drawn is not None:
            fixed.count(windows, result, self.counters)
            result.tell_thoughts(sequences)
            for window, request, draws in zip(windows, requests, drawn, strict=bool(drawn)):
                self._settle(request, fixed.take(window, request, draws, self.counters), result)

    def _tried(self, compute: Callable[[], _Found], sequences: list[Sequence], result: StepResult) -> _Found | None:
        try:
            return compute()
        except RankLost:
            raise  # there is no model any more, for any request
        except Exception as error:  # whatever a model raises, the other requests live on
            log.exception("engine_step_failed", sequences=len(sequences))
            for sequence in sequences:
                self._fail(sequence.key, f"{type(error).__name__}: {error}", result)
            return None

    def _deliver(self, each: SampledToken, result: StepResult) -> None:
        request, drawn = each.request, each.sampled
        if not each.final:
            return request.push_candidate(drawn.token_id)
        if drawn.token_id is None:
            return self._fail(request.sequence.key, NO_TOKEN, result)
        choice, sequence = request.choice, request.sequence
        token = choice.push(drawn.token_id, drawn.logprobs)
        sequence.known = len(choice.tokens)
        if token is not None:
            request.confirm()
        said = [] if token is None else [token]
        result.outputs.append(SequenceOutput(sequence.key, said, choice.finish, sequence.cached or 0))
        self._go_on(request)

    def _go_on(self, request: Request) -> None:
        """With one more token at least."""
        if request.hold:
            request.held = True
            self._scheduler.remove(request.sequence)
        elif request.choice.finish is not None:
            self.release(request.sequence.key)

    def _settle(self, request: Request, taken: VerifiedTokens | None, result: StepResult) -> None:
        """What a verify pass brought."""
        sequence, finish = request.sequence, request.choice.finish
        if taken is None:
            return self._fail(sequence.key, NO_TOKEN, result)
        self._scheduler.commit_verified(sequence, taken.final, len(request.tokens))
        if taken.tokens or finish is not None:
            result.outputs.append(SequenceOutput(sequence.key, taken.tokens, finish, sequence.cached or 0))
            self._go_on(request)

    def _fail(self, key: HandoffId, message: str, result: StepResult) -> None:
        if (allocation := self._requests[key].sequence.allocation) is not None:
            allocation.withdraw()  # whether KV that was read or KV that was written is wrong, nobody shall find it
        self.release(key)
        result.failed.append((key, EngineFault(message)))

    def _check_new(self, key: HandoffId) -> None:
        if key in self._requests or any(output.key == key for output in self._ended):
            raise ValueError(f"handoff {key} is already here")

    def _registered(self, begun: Request | SequenceOutput) -> Request | None:
        if isinstance(begun, SequenceOutput):
            self._ended.append(begun)
            return None
        self._requests[begun.sequence.key] = begun
        return begun
