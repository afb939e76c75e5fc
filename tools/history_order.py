"""State machines for the events of each request and each handoff. The rules are in `history_check.py`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from tools.history_blocks import BlockBook
from tools.history_events import ENDS, Event, Handoff, Journal, Violation

Steps = dict[str, dict[str, str]]
"""Event: the states in which it may come, each with the one that follows."""


def _any(states: str, after: str) -> dict[str, str]:
    return dict.fromkeys(states.split(), after)


# States of a request, at its router.
ROUTER: Steps = {
    "arrived": {"new": "queued"},
    "attempt": {"queued": "trying"},
    "accepted": {"trying": "trying"},
    "delivered": {"trying": "trying"},
    "recovered": {"trying": "queued"},
    "ended": _any("queued trying", "ended"),
}
# States of a handoff, at a worker. After `failed` with `held`, its KV waits for a retransfer, which ends it. A decode
# worker may retransfer a preempted one, and may compute more tokens of it.
PREFILL: Steps = {
    "prefill": {"new": "working"},
    "repush": {"new": "working"},
    "tokens": {"working": "computed", "waiting": "waiting"},
    "pushed": {"computed": "ended"},
    "failed": _any("working computed", "ended"),
    "aborted": _any("working computed waiting", "ended"),
}
DECODE: Steps = {
    "reserved": {"new": "reserved"},
    "offered": {"reserved": "receiving"},
    "committed": {"receiving": "committed"},
    "fenced": _any("reserved receiving", "fenced"),
    "adopted": {"committed": "decoding"},
    "computes": {"fenced": "decoding"},  # the worker computes the prompt itself
    "tokens": {"decoding": "decoding", "moving": "moving"},
    "finished": {"decoding": "ended"},
    "preempted": {"decoding": "ended"},
    "repush": {"new": "moving"},
    "pushed": {"moving": "ended"},
    "failed": _any("committed decoding moving", "ended"),
    "released": _any("fenced committed decoding moving", "ended"),
}
STEPS = {"router": ROUTER, "prefill": PREFILL, "decode": DECODE}
OTHERS = ("started", "registered", "beat", "lease_lost", "owned", "published", "let_go", *ENDS)
NEW_WORK = ("prefill", "repush", "reserved")


@dataclass(slots=True)
class Life:
    """State of a request at its router, or of a handoff at a worker."""

    state: str = "new"
    attempt: int = 0
    accepted: bool = False
    tokens: int | None = 0  # the next index; None means any
    last: Event | None = None


@dataclass(slots=True)
class Book:
    """Checker of one journal, from its first event to its last."""

    journal: Journal
    lives: dict[str | Handoff, Life] = field(default_factory=lambda: defaultdict(Life))
    said: dict[Handoff, set[int]] = field(default_factory=lambda: defaultdict(set))
    attempts: dict[str, int] = field(default_factory=dict)
    blocks: BlockBook = field(default_factory=BlockBook)
    faults: list[Violation] = field(default_factory=list)

    def fault(self, rule: str, event: Event, text: str) -> None:
        """Record a violation."""
        self.faults.append(Violation(rule, event.at, text))

    def read(self) -> None:
        """Check all events."""
        steps = STEPS.get(self.journal.role, {})
        self.faults += frame(self.journal)
        for event in self.journal.events:
            if event.name in steps:
                self._step(event, steps[event.name])
            elif event.name not in OTHERS:
                self.fault("readable", event, f"{event.name} is no event of {self.journal.role or 'anybody'}")
            self.faults += self.blocks.take(event)

    def _step(self, event: Event, step: dict[str, str]) -> None:
        at_router = self.journal.role == "router"
        life = self.lives[event.request if at_router else event.handoff]
        if life.state not in step:
            rule = "one_ending" if life.state == "ended" else "order"
            self.fault(rule, event, f"{event.name} of {name_of(event)}, which is {life.state}")
        life.state = step.get(life.state, next(iter(step.values())))
        if at_router:
            self._routed(event, life)
        else:
            self._worked(event, life)
        life.last = event

    def _routed(self, event: Event, life: Life) -> None:
        attempt = event.handoff[1]
        if event.name == "arrived":
            life.tokens = int(event.facts.get("known", 0))  # tokens that the client of a resumed stream has
        life.attempt += event.name == "attempt"
        if attempt != life.attempt:
            self.fault("attempts", event, f"{event.name} of attempt {attempt}, {life.attempt} is due")
        if event.name == "accepted" and life.accepted:
            self.fault("order", event, f"{event.request} is accepted again")
        elif event.name == "accepted":
            life.accepted = True
        elif not life.accepted and (event.name == "delivered" or event.facts.get("outcome") == "finished"):
            self.fault("order", event, f"{event.name}, but {event.request} was not accepted")
        if event.name == "delivered":
            self._count(event, life)
        elif event.name == "ended" and event.facts.get("count") != life.tokens:
            self.fault("tokens", event, f"{event.facts.get('count')} tokens in all, {life.tokens} were delivered")

    def _worked(self, event: Event, life: Life) -> None:
        request, attempt = event.handoff
        if event.name in NEW_WORK:
            if attempt <= self.attempts.get(request, 0):
                self.fault("attempts", event, f"{name_of(event)} comes after attempt {self.attempts[request]}")
            self.attempts[request] = max(attempt, self.attempts.get(request, 0))
            life.tokens = None
        if event.name == "repush":
            self._rename(event, (request, int(event.facts.get("held", 0))))
        if event.name == "failed" and event.facts.get("held"):
            life.state = "waiting"
        if event.name in {"adopted", "tokens"}:
            self._count(event, life)
            self.said[event.handoff].update(event.tokens)
        if event.name in {"reserved", "committed", "fenced"}:
            self.blocks.writable(event.handoff, event.name == "reserved")

    def _rename(self, event: Event, held: Handoff) -> None:
        """Move held KV from the older handoff to this one."""
        old = self.lives[held]
        preempted = old.last is not None and old.last.name == "preempted"
        if old.state not in (*PREFILL["aborted"], "moving") and not preempted:
            self.fault("order", event, f"repush of {held[0]}/{held[1]}, which is {old.state}")
        old.state, old.last = "ended", event
        self.blocks.rename(held, event.handoff)

    def _count(self, event: Event, life: Life) -> None:
        if life.tokens is not None and event.tokens.start != life.tokens:
            self.fault("tokens", event, f"{event.name} from token {event.tokens.start}, {life.tokens} is next")
        life.tokens = event.tokens.stop


def name_of(event: Event) -> str:
    """Return the handoff as request/attempt."""
    return f"{event.request}/{event.handoff[1]}"


def frame(journal: Journal) -> Iterator[Violation]:
    """Yield violations of the file as a whole: its begin and end, its process, its clock."""
    first = journal.events[0]
    if first.name != "started" or journal.role not in STEPS:
        yield Violation("place", first.at, f"begins with {first.name}, not with started and a role")
    registered = journal.role == "router"
    for before, event in pairwise(journal.events):
        if event.facts["monotonic"] < before.facts["monotonic"]:
            yield Violation("clock", event.at, "time goes back")
        if (event.facts["process"], event.facts["incarnation"]) != (journal.process, journal.incarnation):
            yield Violation("place", event.at, f"of another process than {journal.process}")
        if before.name in ENDS or event.name == "started" or (registered and event.name == "registered"):
            yield Violation("place", event.at, f"{event.name} after {before.name}")
        registered |= event.name == "registered"
        if not registered and event.request:
            yield Violation("place", event.at, f"{event.name} before it was registered")
