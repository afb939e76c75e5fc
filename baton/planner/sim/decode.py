"""Simulated decode worker. It also computes prompts when requested, which is always in colocated mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from baton.core import HandoffId, Role, Sampling, SequenceSpec, Token
from baton.engine.block_pool import Reservation
from baton.errors import HandoffError
from baton.event_journal import History
from baton.planner.sim.engine import Row
from baton.planner.sim.request import FINGERPRINT
from baton.planner.sim.worker import Worker
from decode_workers.reservations import Reservations, State
from kvtransfer.handoff import CommitState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.planner.sim.request import Attempt, PrefillSide

_FIRST = (Token(0, 0, ""),)
_SAMPLING = Sampling()


class _SilentHistory(History):
    """A history that drops events, because simulated time is not logged."""

    def step(self, event: str, handoff: HandoffId, **facts: object) -> None:
        pass


class DecodeWorker(Worker):
    """See `decode_workers.worker`. It uses the production reservation table."""

    role = Role.DECODE

    def begin(self) -> None:
        self.table = Reservations(FINGERPRINT, self._committed, lambda job: None, _SilentHistory())
        self.rows: dict[Attempt, Row] = {}
        self.committing: Attempt | None = None

    # messages from the router

    def reserve(self, attempt: Attempt) -> None:
        """Reserve blocks for the known tokens and one more."""
        self.engine.submit(self._reserve, attempt)

    def compute(self, attempt: Attempt) -> None:
        """Compute the prompt in the reserved blocks, and decode."""
        self.engine.submit(self._compute, attempt)

    def fence(self, attempt: Attempt) -> None:
        """Fence the attempt unless it is committed."""
        self.engine.submit(self._fence, attempt)

    def release(self, attempt: Attempt) -> None:
        """Drop an attempt."""
        self.engine.submit(self._drop, attempt)

    def commit(self, attempt: Attempt, sender: PrefillSide) -> None:
        """Handle the commit, which follows the last byte."""
        if self.dead or sender.dead:
            return
        spec = SequenceSpec(cast("tuple[int, ...]", range(attempt.known)), _SAMPLING, (0,))
        self.committing = attempt
        try:
            self.table.commit(attempt.handoff, sender.ref, CommitState(spec, _FIRST, 0.0, 0.0, 0, "simulated"))
        except HandoffError:
            return  # fenced; the router handles that
        self.kernel.after(self.overheads.hop_s, sender.acknowledged, attempt)

    def _reserve(self, attempt: Attempt) -> None:
        if attempt.over:
            return
        full, spare = (attempt.known - 1) // self.engine.block_size, self.engine.scheduler.watermark
        hashes = attempt.request.content.hashes[:full] if self._prefix_cache else ()
        digests = cast("Iterable[bytes]", hashes)
        layout = self.link.info.layout
        reservation = Reservation.of(self.engine.pool, layout, attempt.known + 1, digests, spare)
        if reservation is None:
            self.send(attempt.no_room)
            return
        self.table.open(attempt.handoff, reservation, attempt.known, None)
        self.send(attempt.reserved, reservation.cached_tokens)

    def _compute(self, attempt: Attempt) -> None:
        reservation = self.table.take(attempt.handoff)
        if reservation is None:
            return
        reservation.release()
        row = self.rows[attempt] = self.row(attempt.handoff, attempt, attempt.known, attempt.tokens)
        self.engine.add(row)

    def _committed(self, handoff: HandoffId, commit: CommitState) -> None:
        assert self.committing is not None
        assert self.committing.handoff is handoff
        self.engine.submit(self._adopt, self.committing)

    def _adopt(self, attempt: Attempt) -> None:
        reservation = self.table.take(attempt.handoff)
        if reservation is None:
            return  # released between the commit and now
        row = self.row(attempt.handoff, attempt, attempt.known + 1, attempt.tokens - 1)
        row.computed = row.prefill_end = attempt.known
        row.allocation = reservation.activate()
        row.last_at = attempt.first_at
        self.rows[attempt] = row
        self.engine.adopt(row, reservation.cached_tokens)
        self.send(attempt.adopted)

    def _fence(self, attempt: Attempt) -> None:
        if attempt in self.rows or self.table.fence(attempt.handoff) is State.COMMITTED:
            return  # the router receives the commit
        self._drop(attempt)
        self.send(attempt.fenced)

    def _drop(self, attempt: Attempt) -> None:
        reservation = self.table.take(attempt.handoff)
        if reservation is not None:
            reservation.release()
        if (row := self.rows.pop(attempt, None)) is not None:
            self.engine.release(row)

    def first(self, row: Row) -> None:
        """See `Listener`."""
        attempt: Attempt = row.owner
        attempt.decoding = True
        self.stream(attempt.first)
        if attempt.tokens == 1:
            self._end(row)

    def finished(self, row: Row) -> None:
        """See `Listener`."""
        self._end(row)

    def preempted(self, row: Row) -> None:
        """See `Listener`. The request continues elsewhere."""
        attempt: Attempt = row.owner
        self._keep_gaps(attempt, row)
        self._forget(attempt)
        self.send(attempt.preempted, self._delivered(attempt, row))

    def _end(self, row: Row) -> None:
        attempt: Attempt = row.owner
        self._keep_gaps(attempt, row)
        self._forget(attempt)
        self.stream(attempt.finished)

    def _keep_gaps(self, attempt: Attempt, row: Row) -> None:
        """Keep the gaps of a sequence that leaves for any reason. Without a token it has none, and has not `joined`."""
        gaps = self.engine.gaps
        if gaps is None or not self.engine.generated(row):
            return
        gaps.forget(min((one.joined for one in self.rows.values()), default=self.engine.steps))
        attempt.request.gaps += gaps.of(row.joined, self.engine.steps) + [(wait_s, 1) for wait_s in row.waits]

    def _forget(self, attempt: Attempt) -> None:
        del self.rows[attempt]

    def _delivered(self, attempt: Attempt, row: Row) -> int:
        """Return the answer tokens generated so far."""
        return attempt.before + row.base - attempt.known + self.engine.generated(row)

    def die(self) -> None:
        super().die()
        for attempt, row in self.rows.items():
            attempt.request.deliver(self._delivered(attempt, row))
            self._keep_gaps(attempt, row)

    def idle_problems(self) -> list[str]:
        left = {"reservations": len(self.table), "rows": len(self.rows)}
        return super().idle_problems() + [f"{self.ref} has {count} {what}" for what, count in left.items() if count]
