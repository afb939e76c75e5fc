"""Simulated prefill worker: computes prompts and first tokens, and pushes their KV during the computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.core import Role
from baton.errors import HandoffError
from baton.planner.sim.engine import Row
from baton.planner.sim.network import Flow
from baton.planner.sim.request import FINGERPRINT
from baton.planner.sim.worker import Worker
from kvtransfer.handoff import Offer

if TYPE_CHECKING:
    from baton.planner.sim.request import Attempt


@dataclass(slots=True, eq=False)
class Push:
    """The KV push of one handoff. `waits`: it has no receiver until a retransfer or a release."""

    row: Row
    skip: int  # tokens that need no transfer
    flow: Flow | None = None
    ready: float = 0.0  # tokens with KV queued in the flow
    computed: bool = False
    computed_at: float = 0.0
    waits: bool = False


class PrefillWorker(Worker):
    """See `prefill_workers.worker`. `pushes` by their current or last attempt."""

    role = Role.PREFILL

    def begin(self) -> None:
        self.pushes: dict[Attempt, Push] = {}

    # messages from the router

    def prefill(self, attempt: Attempt) -> None:
        """Compute the prompt."""
        self.engine.submit(self._prefill, attempt)

    def repush(self, held: Attempt, attempt: Attempt) -> None:
        """Push the held KV of a lost attempt for a new one."""
        self.engine.submit(self._repush, held, attempt)

    def release(self, attempt: Attempt) -> None:
        """Free an attempt's KV."""
        self.engine.submit(self._release, attempt)

    def lost_peer(self, attempt: Attempt) -> None:
        """Keep the KV of an attempt after the death of its decode worker."""
        if (push := self.pushes.get(attempt)) is not None:
            push.waits = True
            if push.flow is not None:
                push.flow.cancel()

    def _prefill(self, attempt: Attempt) -> None:
        if attempt.over and not attempt.kept:
            return
        row = self.row(attempt.handoff, attempt, attempt.known, 1, hold=True)
        push = self.pushes[attempt] = Push(row, attempt.cached)
        self._begin(attempt, push)
        self.engine.add(row)

    def _repush(self, held: Attempt, attempt: Attempt) -> None:
        push = self.pushes.pop(held, None)
        if push is None:
            self.send(attempt.kv_dropped)
            return
        self.pushes[attempt] = push
        push.row.owner, push.row.key, push.skip = attempt, attempt.handoff, attempt.cached
        push.waits, push.ready = False, 0.0
        self._begin(attempt, push)
        if push.computed:
            attempt.first_at, push.computed_at = held.first_at, self.kernel.now
            self.stream(attempt.first)
            self._finish(attempt, push)

    def _begin(self, attempt: Attempt, push: Push) -> None:
        """Offer the push to the decode worker."""
        decode = attempt.decode
        try:
            if decode.dead:
                raise HandoffError(f"{decode.ref} is gone")
            decode.table.offer(attempt.handoff, self.ref, Offer(FINGERPRINT, attempt.known, push.skip))
        except HandoffError:
            push.waits = True  # dead or fenced; the router decides what follows
            return
        if self.network.token_bytes:
            push.flow = Flow(self.kernel, self.way_out, decode.way_in, lambda: self._moved(attempt, push))

    def _release(self, attempt: Attempt) -> None:
        push = self.pushes.pop(attempt, None)
        if push is not None:
            if push.flow is not None:
                push.flow.cancel()
            self.engine.release(push.row)

    def chunk(self, row: Row, count: int, seconds: float) -> None:
        """Queue the KV of earlier chunks, and all layers but the last of this chunk, spread over the step."""
        push = self.pushes[row.owner]
        if push.flow is None or (row.known - push.skip) * self.network.token_bytes <= self.network.coalesce_below:
            return
        layers = self.network.layers
        self._ready(push, row.computed)
        self.kernel.after(seconds / layers, self._ready, push, row.computed + count * (1 - 1 / layers))

    def _ready(self, push: Push, tokens: float) -> None:
        more = tokens - max(push.ready, push.skip)
        if more > 0 and push.flow is not None:
            push.ready = tokens
            push.flow.add(more * self.network.token_bytes)

    def first(self, row: Row) -> None:
        """See `Listener`."""
        attempt: Attempt = row.owner
        push = self.pushes[attempt]
        push.computed = True
        push.computed_at = attempt.first_at = self.kernel.now
        self.stream(attempt.first)
        if attempt.tokens == 1:
            self.stream(attempt.finished)
            self.engine.submit(self._release, attempt)
        else:
            self._finish(attempt, push)

    def _finish(self, attempt: Attempt, push: Push) -> None:
        if push.waits:
            return
        if push.flow is None:
            self._moved(attempt, push)
        else:
            self._ready(push, attempt.known)
            push.flow.close()

    def _moved(self, attempt: Attempt, push: Push) -> None:
        """Send the commit after the last byte."""
        delay_s = self.network.latency_s + self.overheads.commit_s
        self.cluster.tally.transfer.add(self.kernel.now - push.computed_at + delay_s)
        if push.flow is not None:
            self.cluster.tally.moved_bytes += push.flow.moved
        self.kernel.after(delay_s, attempt.decode.commit, attempt, self)

    def acknowledged(self, attempt: Attempt) -> None:
        """Release the KV, which the decode worker has."""
        if not self.dead:
            self.engine.submit(self._release, attempt)

    def jobs_done(self) -> None:
        """Drop KV without receiver if prompts find no block and nothing else will free any, as in production."""
        while self.engine.starved and (spare := self._spare()) is not None:
            self.engine.submit(self._release, spare)
        super().jobs_done()

    def _spare(self) -> Attempt | None:
        """See `prefill_workers.worker.spare`."""
        computed = [(attempt, push.waits) for attempt, push in self.pushes.items() if push.computed]
        return computed[0][0] if computed and all(waits for _, waits in computed) else None

    def finished(self, row: Row) -> None:
        """Fail: every sequence is held."""
        raise AssertionError(row)

    preempted = finished

    def die(self) -> None:
        super().die()
        for push in self.pushes.values():
            if push.flow is not None:
                push.flow.cancel()
