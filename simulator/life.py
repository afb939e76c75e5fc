"""The life of a request, as `router.lifecycle` has it: through as many attempts as it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.errors import DeadlineExceeded, NoWorker, Overloaded
from router.admission import ticket_for
from router.lifecycle import DEADLY
from simulator.attempt import Attempt
from simulator.blocks import UNSHARED

if TYPE_CHECKING:
    from baton.workload import Arrival
    from router.claim import Claim
    from simulator.cluster import Cluster


class Life:
    """One request. `told` is how far its client is; `gaps` are its own, if they are kept."""

    __slots__ = (
        "_arrival", "_cluster", "_directory_names", "_first_at", "_last_at", "accepted", "attempts", "came_at",
        "content", "delivered", "gaps", "held", "kernel", "name", "number", "overheads", "tokens",
    )  # fmt: skip

    def __init__(self, cluster: Cluster, arrival: Arrival, number: int) -> None:
        self._cluster, self._arrival = cluster, arrival
        self.kernel, self.overheads = cluster.kernel, cluster.scenario.overheads
        self.number, self.name = number, str(number)
        self.tokens = max(1, arrival.max_tokens)
        self.content, self._directory_names = cluster.names.of(arrival) if arrival.blocks else (UNSHARED, [])
        self.attempts = self.delivered = 0
        self.came_at = cluster.kernel.now
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

    async def run(self) -> None:
        """From arrival to its one outcome."""
        try:
            outcome = await self._attempts()
        except Overloaded:
            outcome = (
                "expired" if self.attempts or self.kernel.now > self.came_at + self.overheads.admit_s else "refused"
            )
        except (NoWorker, DeadlineExceeded):
            outcome = "expired"
        self._let_go()
        self._cluster.ended(self, outcome)

    async def _attempts(self) -> str:
        failures = deaths = 0
        since: float | None = None
        while self.delivered < self.tokens:
            since = self.kernel.now if since is None else since
            claim = await self._admit(since)
            if not self.attempts:
                self._cluster.tally.queue.add(self.kernel.now - self.came_at)
            attempt = self._attempt(claim)
            reason = await attempt.ended
            if attempt.sent:
                since = None
            attempt.kept = attempt.failed and attempt.held
            attempt.leave(reason)
            if not reason:
                break
            failures, deaths = failures + attempt.failed, deaths + attempt.died
            self._cluster.tally.recoveries[reason] += 1
            if attempt.kept:
                self.held = attempt
            if deaths >= DEADLY or (attempt.failed and failures >= self._cluster.scenario.router.attempts):
                return "failed"
        return "completed"

    async def _admit(self, since: float) -> Claim:
        router, held = self._cluster.router, self.held
        known = held.known if held is not None else self._arrival.prompt_tokens + self.delivered
        link = held.prefill.link if held is not None and held.prefill is not None else None
        wish = router.wish(link, self._directory_names, self._arrival.block_tokens)
        return await router.admission.admit(
            ticket_for(self.number, 0),
            known,
            wish,
            returning=self.attempts > 0,
            accepted=self.accepted,
            since=since,
        )

    def _attempt(self, claim: Claim) -> Attempt:
        """The next one. What is held is of no use to another prefill worker."""
        prefill, decode = self._cluster.workers_of(claim)
        if self.held is not None and self.held.prefill is not prefill:
            self._let_go()
        self.attempts += 1
        held = self.held
        before = self.delivered if held is None else held.before
        known = self._arrival.prompt_tokens + before if held is None else held.known
        if prefill is None:
            self._cluster.tally.local_prefills += 1
        return Attempt(self, claim, prefill, decode, known, before)

    def _let_go(self) -> None:
        """Nothing is held for another attempt any more."""
        held, self.held = self.held, None
        if held is not None and held.prefill is not None and not held.prefill.dead:
            held.prefill.release(held)

    def measures(self) -> tuple[float, float]:
        """TTFT and E2E in seconds."""
        return self._first_at - self.came_at, self._last_at - self.came_at
