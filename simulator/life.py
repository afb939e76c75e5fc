"""The life of a request, as `router.request.lifecycle` has it: through as many attempts as it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.errors import DeadlineExceeded, NoWorker, Overloaded
from router.admission.admission import ticket_for
from router.request.lifecycle import DEADLY
from simulator.attempt import Attempt
from simulator.blocks import UNSHARED

if TYPE_CHECKING:
    from baton.bench.traces import Arrival
    from router.workers.placement import Claim
    from simulator.cluster import Cluster
    from simulator.router import AskedWish


class Life:
    """One request. `told` is how far its client is; `gaps` are its own, if they are kept."""

    __slots__ = (
        "_arrival", "_cluster", "_deaths", "_directory_names", "_failures", "_first_at", "_last_at", "_since",
        "accepted", "attempts", "came_at", "content", "delivered", "gaps", "held", "kernel", "name", "number",
        "overheads", "tokens",
    )  # fmt: skip

    def __init__(self, cluster: Cluster, arrival: Arrival, number: int) -> None:
        self._cluster, self._arrival = cluster, arrival
        self.kernel, self.overheads = cluster.kernel, cluster.scenario.overheads
        self.number, self.name = number, str(number)
        self.tokens = max(1, arrival.max_tokens)
        self.content, self._directory_names = cluster.names.of(arrival) if arrival.blocks else (UNSHARED, [])
        self.attempts = self.delivered = self._failures = self._deaths = 0
        self.came_at = arrival.at_s
        self._since: float | None = None  # it has been looking for a pair
        self.accepted = False
        self.held: Attempt | None = None  # whose KV its prefill worker keeps
        self.gaps: list[tuple[float, int]] = []
        self._first_at = self._last_at = 0.0

    def told(self, tokens: int, *, first: bool = False) -> None:
        """The client has so many. `first`: it is an attempt's first, which came after a wait of its own."""
        now = self.kernel.now
        if tokens <= self.delivered:
            return
        if not self.delivered:
            self._first_at = now
        elif first:
            self._cluster.tally.itl.add(now - self._last_at)
            self.gaps.append((now - self._last_at, 1))
        self.delivered, self._last_at = tokens, now

    def begin(self) -> None:
        """It comes to the queue."""
        self._seek()

    def over(self, attempt: Attempt, reason: str) -> None:
        """What is next after an attempt."""
        if attempt.sent:
            self._since = None
        attempt.kept = attempt.failed and attempt.held
        attempt.leave(reason)
        if not reason:
            self._end("completed")
            return
        self._failures += attempt.failed
        self._deaths += attempt.died
        if attempt.kept:
            self.held = attempt
        if self._deaths >= DEADLY or (attempt.failed and self._failures >= self._cluster.scenario.router.attempts):
            self._end("failed")
            return
        self._cluster.tally.recoveries[reason] += 1
        if self.delivered < self.tokens:
            self._seek()
        else:
            self._end("completed")

    def _seek(self) -> None:
        """A pair of workers. Mostly there is one at once, and no task is needed to wait for it."""
        if self._since is None:
            self._since = self.kernel.now
        router, held = self._cluster.router, self.held
        known = held.known if held is not None else self._arrival.prompt_tokens + self.delivered
        link = held.prefill.link if held is not None and held.prefill is not None else None
        wish = router.wish(link, self._directory_names, self._arrival.block_tokens)
        claim = router.admission.at_once(known, wish, returning=self.attempts > 0)
        if claim is None:
            self.kernel.spawn(self._wait(known, wish, self._since))
        else:
            self._attempt(claim)

    async def _wait(self, known: int, wish: AskedWish, since: float) -> None:
        ticket, returning = ticket_for(self.number, 0), self.attempts > 0
        admit = self._cluster.router.admission.admit
        try:
            claim = await admit(ticket, known, wish, returning=returning, accepted=self.accepted, since=since)
        except Overloaded:
            waited = self.attempts or self.kernel.now > self.came_at + self.overheads.admit_s
            self._end("expired" if waited else "refused")
        except (NoWorker, DeadlineExceeded):
            self._end("expired")
        else:
            self._attempt(claim)

    def _end(self, outcome: str) -> None:
        self._let_go()
        self._cluster.ended(self, outcome)

    def _attempt(self, claim: Claim) -> None:
        """The next one. What is held is of no use to another prefill worker."""
        if not self.attempts:
            self._cluster.tally.queue.add(self.kernel.now - self.came_at)
        prefill, decode = self._cluster.workers_of(claim)
        if self.held is not None and self.held.prefill is not prefill:
            self._let_go()
        self.attempts += 1
        held = self.held
        before = self.delivered if held is None else held.before
        known = self._arrival.prompt_tokens + before if held is None else held.known
        if prefill is None:
            self._cluster.tally.local_prefills += 1
        Attempt(self, claim, prefill, decode, known, before)

    def _let_go(self) -> None:
        """Nothing is held for another attempt any more."""
        held, self.held = self.held, None
        if held is not None and held.prefill is not None and not held.prefill.dead:
            held.prefill.release(held)

    def measures(self) -> tuple[float, float]:
        """TTFT and E2E in seconds."""
        return self._first_at - self.came_at, self._last_at - self.came_at
