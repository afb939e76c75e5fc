"""The one observer of requests. It writes each transition to the history, the log, metrics, activity and traces."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from baton import errors
from baton.clock import Clock, unix_time
from baton.core import Finish, HandoffId, SequenceSpec, Token
from baton.errors import BatonError, Cancelled, InvalidRequest
from baton.event_journal import History
from baton.limits import MAX_CLIENT_TAG_CHARS, MAX_STATUS_MESSAGE_BYTES, MAX_STATUS_VIOLATIONS
from baton.metrics import Metrics
from baton.metrics.router import exemplar_of
from baton.rpc.v1 import inference_pb2 as pb
from baton.stages import Timings
from baton.tracing.trace import TraceContext
from router.activity import ActivityRecorder
from router.admission.promising import Promises
from router.parsing.ranges import NO_PROMISE, Promise
from router.placement.promise import Flight
from router.request.attempt import Attempt
from router.request.traces import Trace, Traces, Track
from router.workers.placement import Placement

log = structlog.get_logger(__name__)

_NO_FAILURES = (Cancelled, errors.DeadlineExceeded, errors.PromiseRefused)  # of a promise
_REFUSALS = (InvalidRequest, errors.UnknownModel, errors.Overloaded, errors.NoWorker, errors.Unsupported)


@dataclass(frozen=True, slots=True)
class Sinks:
    """The destinations of all observations of a router. `slo_ttft_s` and `slo_itl_s` are its SLO in seconds."""

    router_id: str
    clock: Clock
    history: History
    metrics: Metrics
    activity: ActivityRecorder
    traces: Traces
    slo_ttft_s: float
    slo_itl_s: float
    promises: Promises
    outcomes: Counter[str] = field(default_factory=Counter)  # of ended requests; "accepted" counts separately

    def rejected(self, reason: str) -> None:
        """Record a request that the HTTP gateway rejects, which has no observer."""
        self.outcomes["refused"] += 1
        self.metrics.ended("refused", None)
        self.activity.rejected(reason)


class RequestObserver:
    """The observer of one request. `name` is the client's request id; `resumes` means that another router began it."""

    def __init__(self, sinks: Sinks, name: str, context: TraceContext | None = None, *, resumes: bool = False) -> None:
        self.sinks = sinks
        self.name, self.resumes = name, resumes
        now = sinks.clock.monotonic()
        self.arrived = now, unix_time(now, sinks.clock)
        self.trace = Trace(name, context or TraceContext.new(), sinks.router_id, self.arrived[1])
        self.exemplar = exemplar_of(name, self.trace.context.trace_id)
        self.choices: list[ChoiceObserver] = []

    @property
    def is_accepted(self) -> bool:
        return any(choice.is_accepted for choice in self.choices)

    def used(self, usage: pb.Usage) -> None:
        """Count the tokens of a complete answer, and whether it met the SLO."""
        self.sinks.metrics.used(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        if not self.resumes:  # otherwise another router sent the first tokens and measured them
            self.sinks.metrics.kept_slo(met=self._met_slo())

    def ended(self, message: pb.GenerateRequest, error: BatonError | None, **facts: object) -> None:
        """Record how the request ended. `error` is None if it finished; `facts` are for the log."""
        to, outcome, kind = self.sinks, self._outcome(error), type(error).__name__ if error else ""
        to.outcomes[outcome] += 1
        to.outcomes["accepted"] += self.is_accepted
        for choice in self.choices:
            choice.note("ended", outcome=outcome, count=choice.tokens)
            self._settle(choice, error)
        to.traces.ended(self.trace, outcome, kind)
        self._measure(message, outcome, error)
        if error is not None:
            stage = self.choices[0].stages.stage.value if self.choices else "parse"
            trace_id = self.trace.context.trace_id
            facts = {"stage": stage, "error": kind, "reason": _reason(error), "trace_id": trace_id}
        write = log.warning if outcome == "failed" else log.info
        write(
            f"request_{outcome}",
            request_id=self.name,
            client_tag=message.client_tag[:MAX_CLIENT_TAG_CHARS],
            completion_tokens=sum(choice.tokens for choice in self.choices),
            attempts=sum(choice.attempts for choice in self.choices),
            **facts,
        )

    def _settle(self, choice: ChoiceObserver, error: BatonError | None) -> None:
        """Count the promise of a choice, and log it if it is broken."""
        complete, flight = error is None and not self.resumes, choice.flight
        failed = error is not None and not isinstance(error, _NO_FAILURES)
        kept = self.sinks.promises.settle(flight, complete=complete, failed=failed, lost=choice.died)
        if kept.startswith("broken"):
            ttft_s = math.inf if flight.first_at is None else flight.first_at - flight.arrived
            log.warning(
                "promise_broken",
                request_id=self.name,
                outcome=kept,
                ttft_ms=round(1e3 * ttft_s, 1),
                itl_ms=round(1e3 * flight.measured_gap_s, 2),
                promised=[round(1e3 * flight.promise.ttft_s, 1), round(1e3 * flight.promise.itl_s, 2)],
            )

    def _measure(self, message: pb.GenerateRequest, outcome: str, error: BatonError | None) -> None:
        last, timings, age_s, met = None, None, 0.0, None
        if error is None:
            last = max(self.choices, key=lambda choice: choice.stages.timings().e2e_s)
            timings, age_s = last.stages.timings(), max(choice.stages.age_s for choice in self.choices)
            met = None if self.resumes else self._met_slo()
        self.sinks.metrics.ended(
            outcome,
            timings,
            deterministic=message.deterministic,
            tokens=last.tokens if last and not self.resumes else 0,
            exemplar=self.exemplar,
        )
        self.sinks.activity.ended(self.name, outcome, error, age_s, met_slo=met)
        if outcome == "refused" and error is not None:
            self.sinks.metrics.refused(error)

    def _met_slo(self) -> bool:
        return all(choice.met_slo() for choice in self.choices)

    def _outcome(self, error: BatonError | None) -> str:
        if error is None:
            return "finished"
        if isinstance(error, _REFUSALS) and not self.is_accepted:
            return "refused"
        return "cancelled" if isinstance(error, Cancelled) else "failed"


class ChoiceObserver:
    """The observer of one choice, with a method for each transition. `request_id` names the choice on workers, `stream`
    names it for the client, which has `received` tokens of it from a lost router.
    """

    def __init__(
        self,
        request: RequestObserver,
        choice: int,
        request_id: str,
        stream: str,
        spec: SequenceSpec,
        received: int,
        promise: Promise = NO_PROMISE,
    ) -> None:
        to = self._to = request.sinks
        self.track = Track(to.router_id, choice, to.clock, request.arrived)
        self.stages = self.track.stages
        self.metrics = to.metrics
        self.tokens, self._received = received, received
        self.attempts = 0
        self.is_accepted = False
        self.finish: Finish | None = None  # once it has ended
        self.choice, self.request_id = choice, request_id
        self.taken_over = ""  # the request id of a stream that another router began
        self.placed: Placement | None = None
        self.prompt_tokens, self.deterministic = len(spec.prompt), spec.deterministic
        promise = NO_PROMISE if request.resumes else promise  # otherwise another router gave it
        arrived, answer, priority = request.arrived[0], spec.sampling.max_tokens, spec.priority
        self.flight = Flight(len(spec.prompt), answer, arrived, promise, priority=priority, done=received)
        self.died = False  # a worker was lost in one of its attempts
        self._request, self._stream = request, stream
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None
        request.trace.tracks.append(self.track)
        request.choices.append(self)
        self.note("arrived", **({"known": received} if received else {}))
        log.debug("request_arrived", request_id=request_id, known=received)

    def note(self, event: str, **facts: object) -> None:
        if self._to.history.kept:
            self._to.history.note(event, HandoffId(self.request_id, self.attempts), **facts)

    def attempted(self, placement: Placement) -> None:
        self.attempts += 1
        self.placed = placement
        workers = {"prefill": placement.prefill, "decode": placement.decode}
        refs = {role: str(link.info.ref) for role, link in workers.items() if link is not None}
        self.note("attempt", **refs)
        self.stages.attempt = self.attempts
        self.stages.note(**refs)
        log.debug("request_attempted", request_id=self.request_id, attempt=self.attempts, workers=[*refs.values()])

    def accepted(self, attempt: Attempt) -> None:
        self.is_accepted = True
        self.note("accepted")
        log.info(
            "request_accepted",
            request_id=self.request_id,
            stream=self._stream,
            prompt_tokens=self.prompt_tokens,
            workers=attempt.workers,
            trace_id=self._request.trace.context.trace_id,
        )
        if self.choice == 0:
            self.metrics.accepted(self.prompt_tokens)

    def delivered(self, fresh: Sequence[Token]) -> None:
        self.note("delivered", first=fresh[0].index, count=len(fresh))
        self.tokens += len(fresh)
        now = self._to.clock.monotonic()
        self.flight.seen(self.tokens, min(now, self.track.received_at))
        if self._last_token_at is None:
            self._first_token_at = now
            prompt_tokens = 0 if self.choice else self.prompt_tokens
            self._to.activity.recent.first_tokens(len(fresh), self.stages.age_s, prompt_tokens)
            log.debug("request_first_token", request_id=self.request_id, attempt=self.attempts)
            self.metrics.first(len(fresh))
        else:
            gap_s = now - self._last_token_at
            self._to.activity.recent.tokens(len(fresh), gap_s)
            self.metrics.gap(gap_s, len(fresh), self._request.exemplar)
        self._last_token_at = now

    def unfinished(self, attempt: Attempt) -> None:
        error = {"error": type(attempt.lost).__name__} if attempt.lost else {}
        self.stages.note(ended=attempt.retry_reason, **error)

    def recovered(self, attempt: Attempt) -> None:
        reason = attempt.retry_reason
        self.died = self.died or attempt.died
        self.metrics.recovery(reason)
        fenced = attempt.fencing is not None and reason == "prefill_lost"
        self._to.activity.recovered(self._request.name, attempt.workers, reason, fenced=fenced)
        self.note("recovered", reason=reason)
        log.info("request_handed_back", handoff=attempt.handoff, reason=reason, workers=attempt.workers)

    def lookup_failed(self, error: BatonError) -> None:
        log.warning("not_looked_for", request_id=self.request_id, stream=self._stream, error=str(error))

    def finished(self, finish: Finish | None) -> Timings:
        """Record the end of a complete choice, and return its times. They sum to the time from arrival until now."""
        self.stages.end()
        self.finish = finish
        if finish is not None:
            self.metrics.finished(finish.reason)
        return self.stages.timings()

    def met_slo(self) -> bool:
        """Return whether TTFT was within `slo.ttft_ms` and the mean ITL within `slo.itl_ms`."""
        first, last = self._first_token_at, self._last_token_at
        if first is None or last is None:
            return True
        itl_s = (last - first) / max(self.tokens - self._received - 1, 1)
        return self.stages.timings().ttft_s <= self._to.slo_ttft_s and itl_s <= self._to.slo_itl_s


def _reason(error: BatonError) -> str:
    """Return the error text for the log, without texts about a constraint or chat, because they may quote it. It is cut
    as in the status, because a request may have many mistakes.
    """
    if not isinstance(error, InvalidRequest):
        return str(error)[:MAX_STATUS_MESSAGE_BYTES]
    quoting, shown = ("constraint", "chat"), error.violations[:MAX_STATUS_VIOLATIONS]
    text = "; ".join(v.field if v.field.startswith(quoting) else str(v) for v in shown)
    return text[:MAX_STATUS_MESSAGE_BYTES]
