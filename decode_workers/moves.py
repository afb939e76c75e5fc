"""Sequences that move from a leaving decode worker to another one, with their KV.

    offered ──repush──> pushing ──pushed, failed, release, lost router, end of the sequence──> freed

The router reserves at another decode worker and sends Repush here. The push is the one of a prefill worker: the same
offer, frames and commit, with the last delivered token as the first one. A sequence may decode on until it has `stop`
tokens, for which the router reserves. Its full blocks never change, so they leave during that time. Only the rest and
the commit wait for its stop. Everything runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import structlog

from baton.core import HandoffId, SequenceSpec, Token
from baton.engine.block_pool import Allocation
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence as EngineSequence
from baton.engine.step_result import SequenceOutput, StepResult
from baton.errors import HandoffError
from baton.worker import events
from baton.worker.block_census import Holding
from baton.worker.role import Owner, Pusher
from kvtransfer.handoff import PushEnd, PushJob, PushResult

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Move:
    """One sequence. `tokens` are delivered, and grow until there are `stop`. `outputs` came after the offer."""

    session: Owner
    spec: SequenceSpec  # as decoding began here
    stop: int
    tokens: Sequence[int]
    blocks: Allocation
    last: Token
    outputs: list[SequenceOutput] = field(default_factory=list)
    final: int = 0  # positions that the push may read
    pushing: bool = False

    @property
    def over(self) -> bool:
        return bool(self.outputs) and self.outputs[-1].finish is not None


class Moves:
    """The moving sequences by handoff, which is that of the push after a Repush."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._history = engine, engine.pool.history
        self._moves: dict[HandoffId, Move] = {}
        self._pusher: Pusher | None = None

    def __len__(self) -> int:
        return len(self._moves)

    def router(self, handoff: HandoffId) -> str:
        """Return the id of the router of a moving sequence, or an empty string."""
        move = self._moves.get(handoff)
        return move.session.router_id if move is not None else ""

    def attach(self, pusher: Pusher) -> None:
        self._pusher = pusher

    def offer(self, handoff: HandoffId, spec: SequenceSpec, last: Token | None, session: Owner, ahead: int) -> int:
        """Stop a running sequence, now or after `ahead` more tokens at most, and keep its KV. `last` is its last
        delivered token. Returns the number of tokens whose KV moves. Returns 0, and the sequence runs on, if there is
        no such token, the KV before it is not final, or its router is lost, so that none could ask for the KV.
        """
        ahead = 0 if spec.deterministic else ahead  # its tokens come in windows, which may pass the stop
        movable = self._pusher is not None and last is not None and session.router_id
        halted = self._engine.halt(handoff, ahead) if movable else None
        if halted is None or last is None:
            return 0
        tokens, blocks = halted
        most = min(len(spec.prompt) + spec.sampling.max_tokens, self._engine.max_model_len)  # it ends there
        stop = min(len(tokens) + ahead, max(most, len(tokens)))
        self._moves[handoff] = Move(session, spec, stop, tokens, blocks, last)
        session.handoffs.add(handoff)
        return stop - 1

    def push(self, held: HandoffId, job: PushJob, session: Owner) -> bool:
        """Push the KV of `held` as `job.handoff`. Returns False if this session has no such move here, or the new
        handoff is here already.
        """
        move = self._moves.get(held)
        if move is None or move.session is not session or self._pusher is None or job.handoff in self._moves:
            return False
        self._stop(held, move)
        self._moves[job.handoff] = self._moves.pop(held)
        session.handoffs.discard(held)
        session.handoffs.add(job.handoff)
        if not move.over:
            self._engine.rename(held, job.handoff)
        self._history.step("repush", job.handoff, held=held.attempt)
        for output in move.outputs:
            self._send(replace(output, key=job.handoff), move)
        if move.over:
            self.drop(job.handoff)
        else:
            self._begin(self._pusher, job, move)
        return True

    def _begin(self, pusher: Pusher, job: PushJob, move: Move) -> None:
        job = replace(job, known_tokens=move.stop - 1, verify=move.spec.deterministic)
        try:
            pusher.begin(job)
        except (HandoffError, ValueError) as error:  # rejected, so nothing else reports its end
            log.warning("move_refused", handoff=job.handoff, error=str(error))
            self.ended(job.handoff, error if isinstance(error, HandoffError) else HandoffError(str(error)))
            return
        move.pushing, move.final = True, 0
        self._advance(pusher, job.handoff, move)

    def _advance(self, pusher: Pusher, handoff: HandoffId, move: Move) -> None:
        """Let full blocks leave, and after the stop the rest and the commit."""
        final, stopped = len(move.tokens) - 1, len(move.tokens) >= move.stop
        final -= 0 if stopped else final % self._engine.layout.block_size
        if final > move.final:
            move.final = final
            pusher.computed(handoff, move.blocks.blocks, self._engine.layout.layers, final)
        if stopped:
            spec = replace(move.spec, known=tuple(move.tokens[len(move.spec.prompt) :]))
            pusher.finish(handoff, PushEnd(spec, [move.last], self._engine.state_of(handoff)))

    def stepped(self, result: StepResult) -> None:
        """Send what moving sequences produced in a step, or keep it until their Repush."""
        for output in result.outputs:
            if (move := self._moves.get(output.key)) is not None:
                self._stepped(output, move)
        for handoff in (*result.preempted, *(key for key, _ in result.failed)):
            if (move := self._moves.get(handoff)) is not None and self.drop(handoff):  # a later Repush is refused
                move.session.emit([events.failed(handoff, HandoffError("the sequence lost its blocks"))])

    def _stepped(self, output: SequenceOutput, move: Move) -> None:
        move.outputs.append(output)
        move.last = output.tokens[-1] if output.tokens else move.last
        if move.pushing:
            self._send(output, move)
        if move.over and move.pushing:
            self.drop(output.key)
        elif move.over:
            self._engine.release(output.key)
        elif move.pushing and self._pusher is not None:
            self._advance(self._pusher, output.key, move)

    def _send(self, output: SequenceOutput, move: Move) -> None:
        self._history.tokens("tokens", output.key, output.tokens)
        move.session.emit(events.output(output))

    def ended(self, handoff: HandoffId, outcome: PushResult | HandoffError) -> bool:
        """Free a sequence whose push has ended, and report it to its router, which has the KV of a failed one computed
        again. Returns False if the handoff is no move.
        """
        if (move := self._moves.get(handoff)) is None:
            return False
        move.pushing = False
        event = events.pushed(handoff, outcome) if isinstance(outcome, PushResult) else events.failed(handoff, outcome)
        self._history.step(event.WhichOneof("event") or "", handoff)
        self.drop(handoff)
        move.session.emit([event])
        return True

    def drop(self, handoff: HandoffId) -> bool:
        """Free a sequence in any state. Returns False if it is not here."""
        if (move := self._moves.pop(handoff, None)) is None:
            return False
        if move.pushing:
            self._history.step("released", handoff)
        self._stop(handoff, move)
        self._engine.release(handoff)
        move.session.handoffs.discard(handoff)
        return True

    def freed(self, sequence: EngineSequence) -> None:
        """Stop reading the blocks of a sequence before the engine frees them."""
        if (move := self._moves.get(sequence.key)) is not None and move.pushing and self._pusher is not None:
            self._pusher.withdraw(sequence.key)

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
