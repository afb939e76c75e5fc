"""One attempt at a request, as `router.request.attempt` draws it: what the router does when workers say something."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core import HandoffId, Role

if TYPE_CHECKING:
    from router.workers.placement import Claim
    from simulator.life import Life
    from simulator.worker_decode import DecodeWorker
    from simulator.worker_prefill import PrefillWorker

_THROUGH = {"no_room", "preempted"}  # nothing of it is left at the decode worker


class Attempt:
    """`known` tokens are to be computed, `tokens` are to come, and the client had `before` of the answer."""

    __slots__ = (
        "_claim", "_kernel", "before", "cached", "committed", "computed", "decode", "decoding", "died",
        "failed", "fencing", "first_at", "handoff", "kept", "known", "life", "over", "prefill", "repushes", "sent",
        "tokens",
    )  # fmt: skip

    def __init__(
        self, life: Life, claim: Claim, prefill: PrefillWorker | None, decode: DecodeWorker, known: int, before: int
    ) -> None:
        self.life, self._claim, self._kernel = life, claim, life.kernel
        self.prefill, self.decode = prefill, decode
        self.handoff = HandoffId(life.name, life.attempts)
        self.known, self.before, self.tokens = known, before, life.tokens - before
        self.cached = 0  # tokens at the decode worker
        self.first_at = 0.0  # the first token, at its worker
        self.over = self.kept = self.failed = self.died = False
        self.sent = self.repushes = self.computed = self.decoding = self.committed = self.fencing = False
        decode.attempts[self] = None
        if prefill is not None:
            prefill.attempts[self] = None
        self._send(decode, decode.reserve, self)
        if prefill is None:  # now: a prompt that is told of after the answer waits for one more step
            self._send(decode, decode.compute, self)

    @property
    def held(self) -> bool:
        """The prefill worker has what the next attempt needs."""
        prefill, over = self.prefill, self.decoding or self.fencing  # fencing: it is gone
        return self.sent and not over and prefill is not None and self in prefill.attempts

    # --- what workers say ----------------------------------------------------------------------------------------

    def reserved(self, cached: int) -> None:
        """There is room."""
        if self.over:
            return
        self._claim.reserved()
        self.cached, self.sent = cached, True
        self.life.accepted = True
        prefill, held = self.prefill, self.life.held
        self.life.held = None
        if prefill is None:
            return  # the decode worker was told with the Reserve
        if held is not None:
            self.repushes = True
            self._send(prefill, prefill.repush, held, self)
        else:
            self._send(prefill, prefill.prefill, self)

    def no_room(self) -> None:
        """There is none."""
        self._claim.decode.view.full = True
        self.end("no_room")

    def first(self) -> None:
        """The first token is at the client."""
        if self.over:
            return
        self.computed = True
        self.life.told(self.before + 1, first=True)
        if self.prefill is None:
            self._claim.prefill_done()
        else:
            self._claim.computed()

    def adopted(self) -> None:
        """The decode worker goes on, and needs nobody for it."""
        self.committed, self.fencing = True, False
        if not self.over:
            self.decoding = True
            self._claim.prefill_done()

    def finished(self) -> None:
        """All tokens are there."""
        if not self.over:
            self.life.told(self.life.tokens)
            self.end("")

    def preempted(self, delivered: int) -> None:
        """The decode worker needed the room for others."""
        if not self.over:
            self.life.told(delivered)
            self.end("preempted")

    def kv_dropped(self) -> None:
        """The prefill worker did, before it could hand over."""
        self.end("kv_dropped")

    def fenced(self) -> None:
        """It will never be committed."""
        self.failed = True
        self.end("prefill_lost")

    def lost(self, role: Role) -> None:
        """A worker's process is gone."""
        if self.over:
            return
        computes = (self.decoding or self.prefill is None) if role is Role.DECODE else self._computes
        self.died = self.died or computes
        if role is Role.DECODE:
            self.failed = True
            if self.prefill is not None:
                self.prefill.lost_peer(self)
            self.end("decode_lost")
        elif not self.sent:
            self.failed = True
            self.end("prefill_lost")
        elif not (self.committed or self.fencing):
            self.fencing = True
            self._send(self.decode, self.decode.fence, self)

    @property
    def _computes(self) -> bool:
        return self.sent and not (self.computed or self.repushes)

    def end(self, reason: str) -> None:
        """It is over; once. "": with all its tokens; else why another attempt is needed."""
        if not self.over:
            self.over = True
            self._kernel.at(self._kernel.now, self.life.over, self, reason)

    def leave(self, reason: str) -> None:
        """Both workers are rid of it, but for what is kept, and those that said so themselves."""
        prefill, decode = self.prefill, self.decode
        del decode.attempts[self]
        if reason not in _THROUGH and not (self.decoding and not reason):
            self._send(decode, decode.release, self)
        if prefill is not None:
            del prefill.attempts[self]
            if reason and not (self.decoding or self.kept):
                self._send(prefill, prefill.release, self)
        self._claim.release()

    def _send(self, worker: PrefillWorker | DecodeWorker, act: object, *facts: object) -> None:
        """A message to a worker; one that is gone does not get it."""
        self._kernel.after(self.life.overheads.hop_s, _arrived, worker, act, facts)


def _arrived(worker: PrefillWorker | DecodeWorker, act, facts) -> None:  # type: ignore[no-untyped-def]
    if not worker.dead:
        act(*facts)
