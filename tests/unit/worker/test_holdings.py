"""Each role tells who holds which of its blocks, in every state."""

from typing import Any, cast

import pytest

from baton.clock import FakeClock
from baton.core import HandoffId, Role, Token
from baton.errors import ChannelBroken
from baton.worker.census import count
from decode_workers.role import DecodeRole
from kvtransfer.handoff import CommitState, Offer, PushJob
from prefill_workers.role import PrefillRole
from tests.unit.worker.pusher import P
from tests.unit.worker.support import (
    BACKEND,
    BLOCK,
    D,
    FakeSession,
    Records,
    SyncLoop,
    engine_of,
    fence,
    info_of,
    names_of,
    prefill,
    repush,
    reserve,
    spec_of,
)

A, B = HandoffId("a", 1), HandoffId("b", 1)


class Pusher:
    """Takes everything, sends nothing."""

    def begin(self, job): ...

    def computed(self, handoff, blocks, layers, end): ...

    def withdraw(self, handoff): ...

    def finish(self, handoff, end): ...

    def abort(self, handoff): ...


class Worker:
    """One role on a real engine."""

    def __init__(self, role, blocks=40):
        self.engine, self.loop = engine_of(role, blocks), cast(Any, SyncLoop())
        if role is Role.PREFILL:
            info = info_of(P, role, self.engine)
            self.role: Any = PrefillRole(info, self.engine, self.loop, FakeClock())
        else:
            info = info_of(D, role, self.engine)
            self.role = DecodeRole(info, self.engine, self.loop, cast(Any, Records()), FakeClock())
        self.role.attach(Pusher())
        self.session = FakeSession("router-a")

    def take(self, *commands):
        for command in commands:
            self.role.command(self.session, command)

    def step(self):
        self.role.stepped(self.engine.step())

    def states(self):
        """What the census says, which always adds up."""
        census = count(D, self.engine.pool.counts(), self.role.holdings())
        assert census.unaccounted == 0
        return [(held.handoff, held.state, held.blocks, held.router_id) for held in census.held]


@pytest.fixture
def p():
    return Worker(Role.PREFILL)


@pytest.fixture
def d():
    return Worker(Role.DECODE)


def committed(handoff, spec):
    known = (*spec.known, 65)
    first = [Token(len(spec.known), 65, "A")]
    return CommitState(type(spec)(spec.prompt, spec.sampling, known), first, 0.0, 0.0, 0, "memory")


def offer(known=9, skip=0):
    return Offer(BACKEND.fingerprint, known, skip)


def test_a_prefill_worker(p):
    p.take(prefill(A, spec_of(A, 9)), prefill(B, spec_of(B, 5)))
    assert p.states() == [(A, "queued", 0, "router-a"), (B, "queued", 0, "router-a")]
    p.step()
    assert p.states() == [(A, "pushing", 3, "router-a"), (B, "pushing", 2, "router-a")]
    p.role.push_ended(A, ChannelBroken("cut"))
    p.loop.drain()
    assert p.states() == [(A, "waiting", 3, "router-a"), (B, "pushing", 2, "router-a")]
    again = HandoffId("a", 2)
    p.take(repush(A, again))
    assert p.states() == [(B, "pushing", 2, "router-a"), (again, "pushing", 3, "router-a")]
    p.role.gone(p.session)
    assert p.states() == []


def test_a_prompt_that_is_computed_in_chunks():
    worker = Worker(Role.PREFILL)
    worker.engine._scheduler.max_batched_tokens = 4
    worker.take(prefill(A, spec_of(A, 9)))
    worker.step()
    assert worker.states() == [(A, "prefilling", 3, "router-a")]


def test_a_fetch_holds_blocks_beside_the_prompt(p):
    p.role.fetches._cost.computed(1, 10.0)  # computing is dear
    p.take(prefill(A, spec_of(A, 9), skip=8))
    assert p.states() == [(A, "fetching", 2, "router-a")]
    p.role.fetch_ended(A)
    p.loop.drain()
    assert p.states() == [(A, "queued", 0, "router-a")]


def test_a_decode_worker(d):
    d.take(reserve(A, 9), reserve(B, 5))
    assert d.states() == [(A, "reserved", 3, "router-a"), (B, "reserved", 2, "router-a")]
    table = d.role.reservations
    table.offer(A, P, offer())
    table.offer(B, P, offer(5))
    assert d.states() == [(A, "receiving", 3, "router-a"), (B, "receiving", 2, "router-a")]
    table.lost(P)
    assert d.states() == [(A, "fenced", 3, "router-a"), (B, "fenced", 2, "router-a")]
    d.take(fence(A), fence(B))
    assert d.states() == []


def test_from_the_commit_on(d):
    d.take(reserve(A, 9))
    d.role.reservations.offer(A, P, offer())
    d.role.reservations.commit(A, P, committed(A, spec_of(A, 9)))
    assert d.states() == [(A, "committed", 3, "router-a")]
    d.loop.drain()
    assert d.states() == [(A, "decoding", 3, "router-a")]
    while d.engine.has_work():
        d.step()
    assert d.states() == []


def test_what_is_fetched_from_a_decode_worker_is_pinned(d):
    d.take(reserve(A, 9))
    d.role.reservations.offer(A, P, offer())
    d.role.reservations.commit(A, P, committed(A, spec_of(A, 9)))
    d.loop.drain()
    d.role._drop(A)
    names = names_of(spec_of(A, 9).tokens)
    assert len(d.engine.pool.find(names)) == 9 // BLOCK
    d.take(reserve(B, 9, prefix=names))
    d.role.pins.fetch(PushJob(B, P, 8))
    d.loop.drain()
    assert sorted(d.states()) == [(B, "fetched", 2, "router-a"), (B, "reserved", 3, "router-a")]
    d.role.push_ended(B, ChannelBroken("cut"))
    d.loop.drain()
    assert d.states() == [(B, "reserved", 3, "router-a")]


def test_blocks_that_the_role_forgot_are_unaccounted(d):
    d.take(reserve(A, 9))
    d.role.reservations.take(A)
    assert count(D, d.engine.pool.counts(), d.role.holdings()).unaccounted == 3
