"""The logic of the SDK without I/O: folding a stream's events into an answer, and deciding on retries.

`Client` and `AsyncClient` only move messages and wait; what is decided is decided here, once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.client._requests import trusted
from baton.client.types import Choice, Completion, Delta, Placement, Timings, Usage
from baton.clock import Clock
from baton.core import FinishReason, TokenLogprobs
from baton.errors import BatonError, EngineFault, Overloaded
from baton.rpc import convert
from baton.rpc.v1 import inference_pb2 as inference

RETRY_BASE_S = 0.25
RETRY_CAP_S = 5.0


@dataclass(slots=True)
class _ChoiceState:
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    matched_stop: str = ""

    def freeze(self) -> Choice:
        return Choice(
            "".join(self.text), tuple(self.tokens), tuple(self.logprobs), self.finish_reason, self.matched_stop
        )


class Fold:
    """The events of one stream, folded; asserts that each is the next one, and each token too.

    A stream that breaks its promises raises EngineFault: an answer with a gap must not look like an answer.
    """

    def __init__(self) -> None:
        self.request_id = ""
        self.events = 0
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.placement: Placement | None = None
        self._choices: dict[int, _ChoiceState] = {}

    @property
    def started(self) -> bool:
        """Whether an event has arrived: from then on the request must not be sent again."""
        return self.events > 0

    def choice(self, index: int = 0) -> Choice:
        """What has arrived of a choice so far."""
        return self._choices.get(index, _ChoiceState()).freeze()

    def feed(self, event: inference.GenerateEvent) -> Delta | None:
        """Take the next event; returns what it added, if that is text or tokens. Raises EngineFault."""
        self._check_order(event)
        self.request_id = event.request_id
        self.events += 1
        match event.WhichOneof("event"):
            case "tokens":
                return self._tokens(event.tokens)
            case "finished":
                self._finished(event.finished)
            case "completed":
                self._completed(event.completed)
        return None  # the others, also those of newer servers, need nothing done

    def completion(self) -> Completion:
        """The whole answer, once the stream has ended. Raises EngineFault if it ended early."""
        if self.usage is None or self.timings is None or self.placement is None:
            raise self._broken("it ended without Completed")
        if any(state.finish_reason is None for state in self._choices.values()) or not self._choices:
            raise self._broken("a choice did not finish")
        choices = tuple(self.choice(index) for index in sorted(self._choices))
        return Completion(self.request_id, choices, self.usage, self.timings, self.placement)

    def _check_order(self, event: inference.GenerateEvent) -> None:
        if self.usage is not None:
            raise self._broken("an event came after Completed")
        if event.seq != self.events:
            raise self._broken(f"event {event.seq} came where {self.events} was due")
        if self.started and event.request_id != self.request_id:
            raise self._broken(f"an event of request {event.request_id!r} came")

    def _tokens(self, message: inference.Tokens) -> Delta:
        state = self._choices.setdefault(message.choice, _ChoiceState())
        start: int = getattr(message, "from")  # a keyword in Python
        if start != len(state.tokens):
            raise self._broken(f"token {start} of choice {message.choice} came where {len(state.tokens)} was due")
        if state.finish_reason is not None:
            raise self._broken(f"tokens of choice {message.choice} came after its end")
        if len(message.logprobs) not in {0, len(message.ids)}:
            raise self._broken(f"{len(message.ids)} tokens came with {len(message.logprobs)} logprobs")
        logprobs = tuple(convert.token_logprobs_from_pb(entry) for entry in message.logprobs)
        delta = Delta(message.choice, start, tuple(message.ids), message.text, logprobs)
        state.text.append(delta.text)
        state.tokens.extend(delta.tokens)
        state.logprobs.extend(logprobs)
        return delta

    def _finished(self, message: inference.Finished) -> None:
        state = self._choices.setdefault(message.choice, _ChoiceState())
        if state.finish_reason is not None:
            raise self._broken(f"choice {message.choice} ended twice")
        state.finish_reason = trusted(lambda m: convert.finish_reason_from_pb(m.reason), message)
        state.matched_stop = message.matched_stop

    def _completed(self, message: inference.Completed) -> None:
        usage, timings, where = message.usage, message.timings, message.placement
        self.usage = Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        self.timings = Timings(
            timings.queue_s,
            timings.route_s,
            timings.reserve_s,
            timings.prefill_s,
            timings.transfer_s,
            timings.commit_s,
            timings.decode_s,
            timings.ttft_s,
            timings.e2e_s,
        )
        self.placement = Placement(
            where.prefill_worker, where.decode_worker, where.kv_bytes, where.transport, where.attempts
        )

    def _broken(self, what: str) -> EngineFault:
        return EngineFault(f"the stream of request {self.request_id!r} is broken: {what}")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and how long to wait: full jitter, that is evenly between 0 and a bound that doubles."""

    max_retries: int = 2
    base_s: float = RETRY_BASE_S
    cap_s: float = RETRY_CAP_S
    draw: Callable[[], float] = random.SystemRandom().random  # a seeded program must not retry in step with others

    def wait_s(self, error: BatonError, retries: int) -> float:
        """Seconds until the next try; never less than what the server asked for."""
        jitter: float = self.draw() * min(self.cap_s, self.base_s * 2**retries)
        return jitter + (error.retry_after_s if isinstance(error, Overloaded) else 0.0)


class Attempts:
    """The tries of one call, all under one deadline."""

    def __init__(self, policy: RetryPolicy, timeout: float | None, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._deadline = None if timeout is None else clock.monotonic() + timeout
        self._retries = 0

    def remaining(self) -> float | None:
        """Seconds left, never below 0; None without a deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock.monotonic())

    def wait_after(self, error: BatonError, *, started: bool = False) -> float:
        """Seconds to wait before the next try, or raises `error`: no retry helps, or none is left, or no time is.

        `started`: an event of the stream has arrived, so the request must not be sent again.
        """
        if started or not error.retryable or self._retries >= self._policy.max_retries:
            raise error
        wait = self._policy.wait_s(error, self._retries)
        left = self.remaining()
        if left is not None and wait >= left:
            raise error
        self._retries += 1
        return wait


class StreamState:
    """What both kinds of stream show of the answer so far; complete once the stream has ended."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self._fold = Fold()
        self._closed = False

    @property
    def request_id(self) -> str:
        """Named by the server; "" before its first event."""
        return self._fold.request_id

    @property
    def text(self) -> str:
        return self._fold.choice().text

    @property
    def tokens(self) -> tuple[int, ...]:
        return self._fold.choice().tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._fold.choice().finish_reason

    @property
    def usage(self) -> Usage | None:
        return self._fold.usage

    @property
    def timings(self) -> Timings | None:
        return self._fold.timings

    @property
    def placement(self) -> Placement | None:
        return self._fold.placement
