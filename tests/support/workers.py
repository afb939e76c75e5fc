"""A prefill and a decode role on real engines in one thread. The test decides each next step."""

from collections import deque
from typing import Any, cast

import torch

from baton.core import HandoffId, Role, SequenceSpec, Token, WorkerInfo
from baton.engine.engine import Engine
from baton.engine.oracle import OracleBackend, oracle_layout
from baton.errors import InvalidRequest
from baton.testing import FakeClock
from baton.tokenizer import OracleTokenizer
from baton.worker.service import not_taken
from decode_workers.worker import DecodeWorker
from kvtransfer.handoff import Offer
from prefill_workers.worker import PrefillWorker
from tests.support.fake_pusher import CUT, FakePusher, commit_of, done_of
from tests.support.sessions import (
    BACKEND,
    BLOCK,
    GREEDY,
    D,
    FakeSession,
    H,
    P,
    fence,
    names_of,
    prefill,
    prompt_of,
    release,
    reserve,
    spec_of,
)

torch.set_num_threads(1)


def engine_of(role, total_blocks, block_size=BLOCK, *, backend=BACKEND, **options):
    """Create an engine. Block sizes may differ because the oracle's fingerprint does not depend on them."""
    if block_size != BLOCK:
        backend = OracleBackend(oracle_layout(block_size=block_size), max_model_len=64)
    options = {"recompute_preempted": role is Role.PREFILL, "max_running": 16, **options}
    return Engine(backend, OracleTokenizer(), total_blocks=total_blocks, **options)


def info_of(ref, role, engine, thinking_chunk=0):
    facts = engine.backend.fingerprint, "oracle", engine.max_model_len, engine.pool.total, engine.layout
    return WorkerInfo(ref, role, *facts, thinking_chunk=thinking_chunk)


class SyncLoop:
    """A loop whose jobs wait until the test runs them, as jobs wait for a step to end."""

    step_began = 1000.0  # start of a FakeClock

    def __init__(self, engine):
        self.jobs: deque[Any] = deque()

    def submit(self, job):
        self.jobs.append(job)

    def progressed(self):
        pass

    def drain(self):
        while self.jobs:
            self.jobs.popleft()()


class Records:
    """An ownership log in memory."""

    def __init__(self):
        self.notes = []

    def note(self, handoff, router_id, state, stream=""):
        self.notes.append((handoff, router_id, state.name, stream))


class Side:
    """One worker: its engine, loop, role and sender. A decode worker gets its sender on request."""

    def __init__(self, engine, role, loop):
        self.engine, self.role, self.loop = engine, role, loop

    def take(self, session, *commands):
        """Pass commands to the role as `WorkerService` does."""
        for command in commands:
            try:
                self.role.command(session, command)
            except InvalidRequest as error:
                session.emit(not_taken(command, str(error)))

    def serve(self, session, *commands):
        """Pass commands to the role and run until no work is left."""
        self.take(session, *commands)
        self.run()

    def step(self, times=1):
        """Run turns of the engine thread."""
        for _ in range(times):
            self.loop.drain()
            if self.engine.has_work():
                self.role.stepped(self.engine.step())
            self.role.tick()

    def run(self):
        for _ in range(500):
            self.step()
            if not self.engine.has_work() and not self.loop.jobs:
                return
        raise AssertionError("does not come to an end")

    def attach_pusher(self):
        self.pusher = FakePusher(self.engine, self.role.push_ended)
        self.role.attach(self.pusher)
        return self.pusher

    def push_ends(self, handoff=H, outcome=None):
        """End a push and run the job that reports it."""
        self.pusher.done(handoff, outcome or done_of())
        self.loop.drain()

    def give_up(self, session, how):
        """End the handoff H of `session` in one of several ways."""
        if how == "gone":
            self.role.gone(session)
        elif how == "another router":
            other = FakeSession("router-other")
            self.take(other, release())
            assert not other.events
        else:
            self.take(session, {"release": release, "fence": fence}[how]())

    @property
    def counts(self):
        return self.engine.pool.counts()

    @property
    def all_free(self):
        return self.counts.available == self.counts.total


class PrefillSide(Side):
    def __init__(self, blocks=40, clock=None, *, coalesce_below=0, thinking_chunk=0, loop=SyncLoop, **options):
        self.clock, engine = clock or FakeClock(), engine_of(Role.PREFILL, blocks, **options)
        loop = loop(engine)
        info = info_of(P, Role.PREFILL, engine, thinking_chunk)
        super().__init__(engine, PrefillWorker(info, engine, loop, self.clock, coalesce_below=coalesce_below), loop)
        self.attach_pusher()

    def bring(self, session, state):
        """Bring the handoff H, whose prompt takes three steps, to one of the PROMPT_STATES."""
        self.take(session, prefill(deadline_s=5.0))
        self.step({"queued": 0, "computing": 1, "computed": 3}[state.partition(",")[0]])
        if state.endswith("waits"):
            self.push_ends(H, CUT)


class DecodeSide(Side):
    def __init__(self, blocks=40, clock=None, *, loop=SyncLoop, **options):
        self.clock, self.records = clock or FakeClock(), cast(Any, Records())
        engine = engine_of(Role.DECODE, blocks, **options)
        loop = loop(engine)
        info = info_of(D, Role.DECODE, engine)
        super().__init__(engine, DecodeWorker(info, engine, loop, self.records, self.clock), loop)

    def receive(self, session, handoff=H, *, skip=0, **reserving):
        """Reserve, and let P offer."""
        self.take(session, reserve(handoff, **reserving))
        self.role.reservations.offer(handoff, P, Offer(BACKEND.fingerprint, 9, skip))

    def commit(self, handoff=H, spec=None, first=None):
        """Commit as P, by default with the first token "A". No KV was sent."""
        spec = spec or SequenceSpec(prompt_of(handoff), GREEDY, (65,))
        first = [Token(0, 65, "A")] if first is None else first
        self.role.reservations.commit(handoff, P, commit_of(spec, first))


PROMPT_STATES = [f"{state}{waits}" for state in ("queued", "computing", "computed") for waits in ("", ", waits")]
STATES = ["reserved", "receiving", "written", "committed", "adopted", "decoding", "finished"]


class Pair:
    """Both sides with one clock."""

    def __init__(self, prefill_blocks=40, decode_blocks=40, *, decode_block_size=BLOCK, **options):
        self.clock = FakeClock()
        self.prefill = PrefillSide(prefill_blocks, self.clock, **options)
        self.decode = DecodeSide(decode_blocks, self.clock, block_size=decode_block_size)

    def begin(self, session, handoff=H, spec=None, **reserving):
        """Reserve, and prefill if there is capacity. The decode worker may have a prefix cached."""
        spec = spec or spec_of(handoff)
        prefix = names_of(spec.tokens, self.decode.engine.layout.block_size)
        self.decode.take(session, reserve(handoff, len(spec), prefix=prefix, **reserving))
        if (skip := session.cached_at(handoff)) is not None:
            self.prefill.take(session, prefill(handoff, spec, skip=skip))

    def advance(self, handoff=H, upto="reported"):
        """Advance the push to stage `upto`, or to its end ("reported")."""
        pusher = self.prefill.pusher
        while handoff in pusher.pushes and pusher.pushes[handoff].stage != upto:
            pusher.advance(handoff, self.decode)

    def hand_over(self, session, handoff=H, spec=None, *, upto="committed", **reserving):
        """Run a handoff from Reserve to stage `upto`."""
        self.begin(session, handoff, spec, **reserving)
        self.prefill.run()
        self.advance(handoff, upto)

    def adopt(self, session, **reserving):
        """Run H until the decode worker adopts it. The prefill worker has its own session to separate the events."""
        self.decode.take(session, reserve(**reserving))
        self.prefill.take(FakeSession(), prefill())
        self.prefill.run()
        self.advance(upto="committed")
        self.decode.loop.drain()

    def bring(self, session, state):
        """Bring the handoff H to one of the STATES."""
        if state == "reserved":
            self.decode.take(session, reserve(prefix=names_of(spec_of().tokens)))
            return
        self.hand_over(session, upto={"receiving": "offered", "written": "written"}.get(state, "committed"))
        if state in {"adopted", "decoding", "finished"}:
            self.decode.loop.drain()
        if state == "decoding":
            self.decode.step()
        if state == "finished":
            self.decode.run()

    def end_pushes(self):
        """Finish all computation and pushes, and release work that waits for a Repush."""
        side = self.prefill
        side.run()
        for handoff in list(side.pusher.pushes):
            self.advance(handoff)
        side.run()
        for handoff, work in list(side.role._work.items()):
            side.take(work.session, release(handoff))
        side.run()

    def warm(self):
        """Put the full blocks of H's prompt into both caches."""
        session, before = FakeSession("router-before"), HandoffId("warm", 1)
        self.hand_over(session, before, spec_of(), upto="reported")
        self.decode.run()
        self.end_pushes()
        assert session.kinds(before)[-2:] == ["finish", "pushed"]
        assert self.decode.all_free
        return self

    def cached(self):
        """Return the cached blocks of H's prompt on the decode worker."""
        return self.decode.engine.pool.find(names_of(spec_of().tokens))

    def ends_free(self):
        """End the remaining pushes and check that no worker holds anything."""
        self.end_pushes()
        self.decode.run()
        assert self.prefill.all_free
        assert self.decode.all_free
        assert len(self.decode.role.reservations) == 0
