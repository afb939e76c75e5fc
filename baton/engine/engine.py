"""The engine of a worker: sequences in, tokens out, one `step` at a time. Used by one thread.

    submit ──> waiting ──> running ──> finished           blocks freed here
                 ^            │  └───> held               hold=True: blocks stay until release
                 └─preempted──┤
    adopt ────────────────────┘        (or preempted and handed back)

Progress is counted, not phased: a sequence has known and computed tokens, and every kind of work (prompt chunks,
decoding, starting over after a preemption or elsewhere) is to let computed catch up with known.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import structlog
import torch

from baton.engine.blocks import BlockPool, BlockState
from baton.engine.choice import Choices
from baton.engine.inputs import Inputs
from baton.engine.outcome import Counters, Output, StepResult
from baton.engine.prefix import Chain, scope_key
from baton.engine.reservation import Reservation
from baton.engine.sampler import Sampler
from baton.engine.scheduler import Scheduler, Sequence
from baton.errors import EngineFault, RankLost
from baton.load import Load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Sequence as TokenSequence

    from baton.core import Finish, HandoffId, SequenceSpec
    from baton.engine.backend import ModelBackend
    from baton.engine.blocks import Allocation
    from baton.engine.choice import Choice
    from baton.engine.sampler import Sampled
    from baton.engine.scheduler import Work
    from baton.tokenizer import Tokenizer

    LayerListener = Callable[[list[Work], int], None]
    """Told the work of a step and the number of a layer whose K and V are written for it."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Request:
    sequence: Sequence
    choice: Choice
    hold: bool = False
    held: bool = False


class Engine:
    """One model, its KV cache, and the requests that use them.

    A sequence ends at `max_model_len` tokens (None: the model's), and where it would not fit the pool alone.
    `max_batched_tokens` bounds the tokens of one step, `max_running` the sequences in it. `recompute_preempted`: start
    preempted sequences over here, or hand them back through `StepResult.preempted`. `prefix_cache`: keep the KV of full
    blocks while there is room, and compute nothing that is there already, within a request's `cache_scope`.
    """

    def __init__(
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
    ) -> None:
        self.backend = backend
        self.layout = backend.layout
        self.tokenizer = tokenizer
        self.pool = BlockPool(total_blocks)
        self.kv = backend.make_cache(total_blocks)
        self.counters = Counters()
        self._prefix_cache = prefix_cache
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
        self._inputs = Inputs(backend, max_batched_tokens, max_running, max_blocks)
        self._choices = Choices(tokenizer, backend.vocab_size, self.max_model_len)
        self._sampler = Sampler()
        self._requests: dict[HandoffId, _Request] = {}
        self._ended: list[Output] = []  # ended by what was known already; told with the next step
        self._arrivals = 0
        self._on_layer: LayerListener | None = None

    def watch(self, on_layer: LayerListener, on_free: Callable[[Sequence], None]) -> None:
        """Have `on_layer` told, in the middle of each step, what is computed layer by layer, and `on_free` of each
        sequence whose blocks are about to be let go: when it returns, nobody may read them any more.
        """
        self._on_layer, self._scheduler.on_free = on_layer, on_free

    def reserve(self, tokens: int, prefix: TokenSequence[bytes] = ()) -> Reservation | None:
        """Room for the KV of `tokens` positions and one more, or None: not now.

        `prefix` names the sequence's first full blocks: those that are in the cache need not come, but for the last
        position, which always does. Leaves one block for each running sequence to grow into, and room for the next that
        waits here.
        """
        most = (tokens - 1) // self.layout.block_size
        shared = self.pool.allocate(0, shared=self.pool.find(prefix[:most]) if self._prefix_cache else ())
        assert shared is not None  # nobody has to make room for them
        need, spare = self.layout.blocks_for(tokens + 1) - len(shared), self._scheduler.watermark
        own = self.pool.allocate(need, reserved=True, spare=spare)
        if own is None:
            shared.release()
            return None
        return Reservation(shared, own, len(shared) * self.layout.block_size)

    def submit(self, key: HandoffId, spec: SequenceSpec, *, hold: bool = False) -> None:
        """Compute `spec` from its first token on. `hold`: stop after one new token and keep the blocks for `held`.

        Raises InvalidRequest if it can never be computed here, ValueError if `key` is in use.
        """
        self.validate(spec)
        request = self._register(key, spec, computed=0, hold=hold)
        if request is not None:
            self._scheduler.add(request.sequence)

    def adopt(self, key: HandoffId, spec: SequenceSpec, reservation: Reservation) -> None:
        """Go on with a sequence whose KV, but for its last token, lies in `reservation` (from `reserve`).

        The last token of `spec.known` was delivered elsewhere; the next one has index `len(spec.known)`. The
        reservation is the engine's from here on. Raises ValueError if it is used already or too small, or if `key` is
        in use, and InvalidRequest like `submit`; it is the caller's still then.
        """
        self.validate(spec)
        own, blocks = reservation.own, len(reservation.blocks)
        if not own.belongs_to(self.pool) or blocks < self.layout.blocks_for(len(spec) - 1):
            raise ValueError(f"a reservation of {blocks} blocks does not fit {len(spec)} tokens")
        if own.state is not BlockState.RESERVED:
            raise ValueError(f"the reservation is {own.state.value}, not reserved")
        request = self._register(key, spec, computed=len(spec) - 1)
        allocation = reservation.activate()
        if request is None:
            self.pool.history.blocks("let_go", key, allocation)
            allocation.release()
            return
        request.sequence.allocation = allocation
        self._scheduler.adopt(request.sequence, reservation.cached_tokens)

    def rename(self, key: HandoffId, new: HandoffId) -> None:
        """From now on the request `key` is `new`, in whatever state. Raises KeyError or ValueError for wrong ones."""
        if new in self._requests:
            raise ValueError(f"handoff {new} is already here")
        request = self._requests[new] = self._requests.pop(key)
        request.sequence.key = new

    def held(self, key: HandoffId) -> Allocation:
        """Blocks with the KV of all tokens of a held sequence's spec. Raises KeyError if `key` is not held."""
        request = self._requests[key]
        if not request.held or request.sequence.allocation is None:
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
            self._scheduler.let_go(request.sequence)

    def finish_of(self, spec: SequenceSpec) -> Finish | None:
        """How `spec.known` ends its request already, if it does. Raises InvalidRequest like `submit`."""
        self.validate(spec)
        return self._choices.start(spec).finish

    def validate(self, spec: SequenceSpec) -> None:
        """Raises InvalidRequest, naming the field, if `spec` can never be computed here."""
        self._choices.check(spec)

    def has_work(self) -> bool:
        """Whether a step could bring anything. Held sequences wait for others, not for a step."""
        return bool(self._scheduler.running or self._scheduler.waiting or self._ended)

    def load(self) -> Load:
        """The engine's part of what a worker reports."""
        running = self._scheduler.running
        return Load(
            step=self.counters.steps,
            running=len(running),
            waiting=len(self._scheduler.waiting),
            queued_tokens=sum(max(0, s.prefill_end - s.computed) for s in running) + self._scheduler.waiting_tokens,
            prefill_tokens=self.counters.prefill_tokens,
            cached_tokens=self.counters.cached_tokens,
            decode_steps=self.counters.decode_steps,
            decode_tokens=self.counters.decode_tokens,
            blocks=self.pool.counts(),
        )

    def step(self) -> StepResult:
        """Schedule, compute, and tell what came of it."""
        result = StepResult(outputs=self._ended)
        self._ended = []
        plan = self._scheduler.plan()
        self.counters.preemptions += len(plan.preempted)
        self.counters.cached_tokens += plan.cached_tokens
        if not self._scheduler.recompute_preempted:
            result.preempted = [sequence.key for sequence in plan.preempted]
            for key in result.preempted:
                del self._requests[key]
        if plan.work:
            self._run(plan.work, result)
        return result

    def _run(self, work: list[Work], result: StepResult) -> None:
        try:
            sampled = self._compute(work)
        except RankLost:
            raise  # there is no model any more, for any request
        except Exception as error:  # whatever a model raises, the other requests live on
            log.exception("engine_step_failed", sequences=len(work))
            for item in work:
                self._fail(item.sequence.key, f"{type(error).__name__}: {error}", result)
            return
        self._advance(work, result)
        for key, drawn in sampled.items():
            self._deliver(key, drawn, result)

    @torch.inference_mode()
    def _compute(self, work: list[Work]) -> dict[HandoffId, Sampled]:
        """Run the model; a draw for each sequence of which all known tokens are computed then."""
        told = partial(self._on_layer, work) if self._on_layer is not None else None
        batch = self._inputs.build(work, [self._requests[item.sequence.key].choice.tokens for item in work], told)
        logits = self.backend.forward(batch, self.kv)
        keys = [item.sequence.key for item in work if item.completes]
        draws = self._sampler.sample(logits, [self._requests[key].choice.row for key in keys]) if keys else []
        return dict(zip(keys, draws, strict=True))

    def _advance(self, work: list[Work], result: StepResult) -> None:
        result.computed = total = sum(item.count for item in work)
        result.prefill = prefill = sum(item.prefill_tokens for item in work)
        result.context = sum(item.context for item in work)
        self.counters.steps += 1
        self.counters.prefill_tokens += prefill
        self.counters.decode_tokens += total - prefill
        self.counters.decode_steps += total > prefill
        self._scheduler.advance(work)

    def _deliver(self, key: HandoffId, drawn: Sampled, result: StepResult) -> None:
        request = self._requests[key]
        if drawn.token_id is None:
            self._fail(key, "no token can be drawn: the best logit is not a finite number", result)
            return
        choice, sequence = request.choice, request.sequence
        token = choice.push(drawn.token_id, drawn.logprobs)
        sequence.known = len(choice.tokens)
        result.outputs.append(Output(key, [] if token is None else [token], choice.finish, sequence.cached or 0))
        if request.hold:
            request.held = True
            self._scheduler.remove(sequence)
        elif choice.finish is not None:
            self.release(key)

    def _fail(self, key: HandoffId, message: str, result: StepResult) -> None:
        allocation = self._requests[key].sequence.allocation
        if allocation is not None:
            allocation.withdraw()  # whether KV that was read or KV that was written is wrong, nobody shall find it
        self.release(key)
        result.failed.append((key, EngineFault(message)))

    def _register(self, key: HandoffId, spec: SequenceSpec, *, computed: int, hold: bool = False) -> _Request | None:
        """A new request, or None if what it knows has ended it: then only its ending is left to tell."""
        if key in self._requests or any(output.key == key for output in self._ended):
            raise ValueError(f"handoff {key} is already here")
        choice = self._choices.start(spec)
        if choice.finish is not None:
            self._ended.append(Output(key, [], choice.finish))
            return None
        self._arrivals += 1
        prefill_end = len(spec) if computed == 0 else computed
        sequence = Sequence(key, self._arrivals, len(spec), prefill_end, computed, priority=spec.priority)
        if self._prefix_cache:
            scope = scope_key(self.backend.fingerprint, spec.cache_scope)
            sequence.chain = Chain(scope, choice.tokens, self.layout.block_size)
        request = self._requests[key] = _Request(sequence, choice, hold)
        return request
