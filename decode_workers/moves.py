"""Sequences that a leaving decode worker holds until another one has their KV.

    preempted, held ──repush──> pushing ──pushed, failed, release, lost router──> freed

The router reserves at another decode worker and sends Repush here. The push is the one of a prefill worker: the same
offer, frames and commit, with the last delivered token as the first one. Everything runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import structlog

from baton.core import HandoffId, SequenceSpec, Token
from baton.engine.engine import Engine
from baton.errors import HandoffError
from baton.worker import events
from baton.worker.block_census import Holding
from baton.worker.role import Owner, Pusher
from kvtransfer.handoff import PushEnd, PushJob, PushResult

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Move:
    """One held sequence. `end` is the commit of its push."""

    session: Owner
    end: PushEnd
    pushing: bool = False


class Moves:
    """The held sequences by handoff, which is that of the push after a Repush."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._moves: dict[HandoffId, Move] = {}
        self._pusher: Pusher | None = None

    def __len__(self) -> int:
        return len(self._moves)

    def attach(self, pusher: Pusher) -> None:
        self._pusher = pusher

    def hold(self, handoff: HandoffId, spec: SequenceSpec, last: Token | None, session: Owner) -> bool:
        """Stop a running sequence and keep its KV. `last` is its last delivered token. Returns False, and the sequence
        runs on, if there is no such token or the KV before it is not final.
        """
        tokens = self._engine.halt(handoff) if self._pusher is not None and last is not None else None
        if tokens is None or last is None:
            return False
        known = tuple(tokens[len(spec.prompt) :])
        end = PushEnd(replace(spec, known=known), [last], self._engine.thinking_state(handoff))
        self._moves[handoff] = Move(session, end)
        session.handoffs.add(handoff)
        return True

    def push(self, held: HandoffId, job: PushJob, session: Owner) -> bool:
        """Push held KV as `job.handoff`. Returns False if this session holds nothing of `held` here, or the new handoff
        is here already.
        """
        move = self._moves.get(held)
        if move is None or move.session is not session or self._pusher is None or job.handoff in self._moves:
            return False
        self._stop(held, move)
        self._engine.rename(held, job.handoff)
        self._moves[job.handoff] = self._moves.pop(held)
        session.handoffs.discard(held)
        session.handoffs.add(job.handoff)
        self._begin(self._pusher, job, move)
        return True

    def _begin(self, pusher: Pusher, job: PushJob, move: Move) -> None:
        spec = move.end.spec
        assert spec is not None
        job = replace(job, known_tokens=len(spec) - 1, verify=spec.deterministic)
        layers, blocks = self._engine.layout.layers, self._engine.held(job.handoff).blocks
        self._engine.pool.history.step("repush", job.handoff)
        try:
            pusher.begin(job)
        except (HandoffError, ValueError) as error:  # rejected, so nothing else reports its end
            log.warning("move_refused", handoff=job.handoff, error=str(error))
            self.ended(job.handoff, error if isinstance(error, HandoffError) else HandoffError(str(error)))
            return
        move.pushing = True
        pusher.computed(job.handoff, blocks, layers, job.known_tokens)
        pusher.finish(job.handoff, move.end)

    def ended(self, handoff: HandoffId, outcome: PushResult | HandoffError) -> bool:
        """Free a sequence whose push has ended, and report it to its router, which has the KV of a failed one computed
        again. Returns False if the handoff is no move.
        """
        if (move := self._moves.get(handoff)) is None:
            return False
        move.pushing = False
        self.drop(handoff)
        if isinstance(outcome, PushResult):
            move.session.emit([events.pushed(handoff, outcome)])
        else:
            move.session.emit([events.failed(handoff, outcome)])
        return True

    def drop(self, handoff: HandoffId) -> bool:
        """Free a held sequence in any state. Returns False if it is not held."""
        if (move := self._moves.pop(handoff, None)) is None:
            return False
        self._stop(handoff, move)
        self._engine.release(handoff)
        move.session.handoffs.discard(handoff)
        return True

    def holding(self, handoff: HandoffId, blocks: list[int]) -> Iterator[Holding]:
        """Yield the holding of a move with these blocks, or nothing if it is none."""
        if (move := self._moves.get(handoff)) is not None:
            yield Holding(handoff, "moving", blocks, move.session.router_id)

    def _stop(self, handoff: HandoffId, move: Move) -> None:
        """End a push before its blocks are freed or pushed again."""
        if move.pushing and self._pusher is not None:
            self._pusher.withdraw(handoff)
            self._pusher.abort(handoff)
            move.pushing = False
