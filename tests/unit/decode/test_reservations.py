"""The reservation table: one writer, one commit, no commit after a fence, no free while a write is running."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from baton.core import HandoffId, Incarnation, Sampling, SequenceSpec, Token, WorkerRef
from baton.errors import OfferRefused, StaleAttempt
from baton.rpc.v1 import peer_pb2 as pb
from decode_workers import reservations
from decode_workers.reservations import Reservations, State
from kvtransfer.frames import whole_layers
from kvtransfer.handoff import CommitState, Offer, PushJob
from kvtransfer.receive_loop import EndOfHandoff, ReceiveLoop, inbound_of
from kvtransfer.transports.base import Choice, Endpoint
from tests.support.time_factor import scaled
from tests.unit.kvtransfer import byhand
from tests.unit.kvtransfer.ends import Stopped
from tests.unit.kvtransfer.support import SETTINGS, D, make_kv

P1 = WorkerRef("p1", Incarnation(1, 1), "127.0.0.1:1")
P2 = WorkerRef("p1", Incarnation(1, 2), "127.0.0.1:1")  # the same worker id, another incarnation
H = HandoffId("r", 1)


def commit_of(known):
    spec = SequenceSpec(prompt=tuple(range(known)), sampling=Sampling(), known=(5,))
    return CommitState(spec, [Token(0, 5, "x")], 0.1, 0.1, 64, "memory")


class Recording(Reservations):
    def __init__(self):
        self.commits: list[HandoffId] = []
        self.fetches: list[PushJob] = []
        super().__init__("fp", lambda handoff, commit: self.commits.append(handoff), self.fetches.append)


@pytest.fixture
def table():
    return Recording()


def offer(known=6, fingerprint="fp", skip=0):
    return Offer(fingerprint=fingerprint, known_tokens=known, skip=skip)


def opened(table, handoff=H, cached=0):
    """Open a reservation of three blocks of 4 positions. `cached` positions are in shared blocks."""
    shared = SimpleNamespace(blocks=[7, 8, 9][: cached // 4])
    reservation = SimpleNamespace(cached_tokens=cached, blocks=[7, 8, 9], shared=shared)
    table.open(handoff, reservation, 6, None)
    return reservation


def receiving(table):
    reservation = opened(table)
    table.offer(H, P1, offer())
    return reservation


def test_a_handoff_from_reservation_to_adoption(table):
    reservation = receiving(table)
    with table.writing(H, P1) as blocks:
        assert list(blocks) == [7, 8, 9]
    table.commit(H, P1, commit_of(6))
    with pytest.raises(StaleAttempt):
        table.commit(H, P1, commit_of(6))
    assert table.commits == [H]
    assert table.fence(H) is State.COMMITTED
    assert table.take(H) is reservation
    assert len(table) == 0


@pytest.mark.parametrize(("end", "args"), [("fence", [H]), ("take", [H]), ("aborted", [H, P1]), ("lost", [P1])])
def test_nothing_is_written_or_committed_after_the_end(table, end, args):
    receiving(table)
    getattr(table, end)(*args)
    with pytest.raises(StaleAttempt), table.writing(H, P1):
        raise AssertionError("must not get here")
    with pytest.raises(StaleAttempt):
        table.commit(H, P1, commit_of(6))
    assert table.commits == []


def test_another_incarnation_is_another_worker(table):
    receiving(table)
    for action in (lambda: table.writing(H, P2).__enter__(), lambda: table.commit(H, P2, commit_of(6))):
        with pytest.raises(StaleAttempt, match="was opened by"):
            action()
    table.lost(P2)
    table.aborted(H, P2)
    table.commit(H, P1, commit_of(6))
    assert table.commits == [H]


@pytest.mark.parametrize(
    ("bad", "named"),
    [(offer(known=7), "length"), (offer(fingerprint="other"), "fingerprint"), (offer(skip=4), "length")],
)
def test_an_offer_that_does_not_fit_is_refused_by_name(table, bad, named):
    with pytest.raises(StaleAttempt, match="no reservation"):
        table.offer(H, P1, offer())
    opened(table)
    with pytest.raises(OfferRefused, match=named):
        table.offer(H, P1, bad)
    table.offer(H, P1, offer())  # the reservation is untouched


@pytest.mark.parametrize("cached", [0, 4])
def test_an_offer_skips_exactly_what_is_here(table, cached):
    opened(table, cached=cached)
    for skip in {0, 1, 4, 5, 6} - {cached}:
        with pytest.raises(OfferRefused, match=f"with {skip} skipped are offered, 6 with {cached} skipped"):
            table.offer(H, P1, offer(skip=skip))
    table.offer(H, P1, offer(skip=cached))
    with table.writing(H, P1) as blocks:
        assert list(blocks) == [7, 8, 9], "by position, with those that are shared"


def test_what_is_here_can_be_fetched_by_the_sender_while_it_may_send(table):
    opened(table, cached=4)
    with pytest.raises(StaleAttempt, match="RESERVED"):
        table.fetch(H, P1, 0, 4)
    table.offer(H, P1, offer(skip=4))
    for begin, end in ((-1, 4), (0, 5), (4, 4), (3, 2)):
        with pytest.raises(OfferRefused, match="4 are cached here"):
            table.fetch(H, P1, begin, end)
    with pytest.raises(StaleAttempt, match="was opened by"):
        table.fetch(H, P2, 0, 4)
    assert table.fetches == []
    table.fetch(H, P1, 1, 4)
    assert table.fetches == [PushJob(H, P1, 4, 1)]
    table.fetch(H, P1, 1, 4, verify=True)
    assert table.fetches[1:] == [PushJob(H, P1, 4, 1, verify=True)]
    assert table.shared(H) == [7]
    table.fence(H)
    with pytest.raises(StaleAttempt, match="FENCED"):
        table.fetch(H, P1, 0, 4)
    table.take(H)
    assert table.shared(H) == []


def test_a_commit_without_a_first_token_is_refused(table):
    receiving(table)
    for wrong in (commit_of(4), CommitState(None, [], 0.1, 0.1, 64, "memory")):
        with pytest.raises(OfferRefused, match="length"):
            table.commit(H, P1, wrong)
    assert table.commits == []


class Watched:
    """A lock that reports when a thread must wait for it."""

    def __init__(self):
        self._lock, self.wanted = threading.Lock(), threading.Event()

    def __enter__(self):
        if not self._lock.acquire(blocking=False):
            self.wanted.set()
            self._lock.acquire()

    def __exit__(self, *error):
        self._lock.release()


WAITING = {"take": [], "fence": [], "commit": [P1, commit_of(6)], "offer": [P1, offer()]}


@pytest.mark.parametrize("call", WAITING)
def test_a_call_waits_for_a_write_that_is_running(table, call):
    receiving(table)
    lock = table._entries[H].lock = Watched()
    with ThreadPoolExecutor(1) as pool, table.writing(H, P1):
        waiting = pool.submit(getattr(table, call), H, *WAITING[call])
        assert lock.wanted.wait(scaled(10))
    assert isinstance(waiting.exception(), StaleAttempt) == (call == "offer")


def test_a_fence_waits_for_a_commit_that_is_running(table):
    receiving(table)
    lock = table._entries[H].lock = Watched()
    check = Stopped(reservations, "_check_first")
    with ThreadPoolExecutor(2) as pool:
        pool.submit(table.commit, H, P1, commit_of(6))
        check.wait()
        fencing = pool.submit(table.fence, H)
        assert lock.wanted.wait(scaled(10))
        check.go_on()
    assert fencing.result() is State.COMMITTED
    assert table.commits == [H]


def test_a_lost_sender_waits_for_no_write_of_another(table):
    receiving(table)
    with ThreadPoolExecutor(1) as pool, table.writing(H, P1):
        pool.submit(table.lost, P2).result(scaled(5))


@pytest.mark.parametrize(("end", "args"), [("take", [H]), ("fence", [H]), ("lost", [P1])])
def test_no_end_waits_while_the_whole_kv_is_hashed(table, end, args):
    """The commit that follows is refused, although all of its KV is right."""
    receiving(table)
    kv, replies = make_kv(1), list[pb.PeerReply]()
    transport: Any = SimpleNamespace(name="one-sided", one_sided=True)
    receiver = Endpoint(kv, D, "fp", SETTINGS, Choice([transport]))
    message = pb.Offer(fingerprint="fp", known_tokens=6, verify_kv=True)
    loop, inbound = ReceiveLoop(receiver, table, P1, transport, replies.append), inbound_of(receiver, H, message)[1]
    loop.inbound[H] = inbound
    for frame in whole_layers(kv.layout, 0, 6):
        inbound.announced.read(frame)
    hashing = Stopped(inbound.whole, "add")
    with ThreadPoolExecutor(2) as pool:
        concluding = pool.submit(loop._conclude, EndOfHandoff(inbound, byhand.commit_of(6, []), 0))
        hashing.wait()
        try:
            pool.submit(getattr(table, end), *args).result(scaled(5))
        finally:
            hashing.go_on()
        concluding.result(scaled(5))
    assert [reply.refused.reason for reply in replies] == [pb.HANDOFF_REFUSAL_STALE]
    assert (table.commits, loop.inbound) == ([], {})


class Machine(RuleBasedStateMachine):
    """Random interleavings, compared with plain dictionaries."""

    handoffs = Bundle("handoffs")

    def __init__(self):
        super().__init__()
        self.table = Recording()
        self.commits = self.table.commits
        self.ended = set()
        self.held = {}
        self.taken = []

    @rule(target=handoffs, request=st.sampled_from("ab"), attempt=st.integers(1, 4))
    def open(self, request, attempt):
        """Open an attempt. It must be newer than all attempts of its request that were opened or fenced."""
        handoff = HandoffId(request, attempt)
        newer = all(attempt > seen.attempt for seen in self.ended.union(self.held) if seen.request_id == request)
        with contextlib.nullcontext() if newer else pytest.raises(StaleAttempt):
            self.held[handoff] = opened(self.table, handoff)
        return handoff

    @rule(handoff=handoffs, sender=st.sampled_from([P1, P2]))
    def offer(self, handoff, sender):
        with contextlib.suppress(StaleAttempt, OfferRefused):
            self.table.offer(handoff, sender, offer())

    @rule(handoff=handoffs, sender=st.sampled_from([P1, P2]))
    def commit(self, handoff, sender):
        before = len(self.commits)
        with contextlib.suppress(StaleAttempt, OfferRefused):
            self.table.commit(handoff, sender, commit_of(6))
        if len(self.commits) > before:
            assert handoff not in self.ended

    @rule(request=st.sampled_from("ab"), attempt=st.integers(1, 4))
    def fence(self, request, attempt):
        """Fence an attempt, which may be unknown."""
        handoff = HandoffId(request, attempt)
        answer = self.table.fence(handoff)
        if answer is State.FENCED:
            self.ended.add(handoff)
        else:
            assert handoff in self.commits

    @rule(handoff=handoffs)
    def take(self, handoff):
        reservation = self.table.take(handoff)
        self.ended.add(handoff)
        if reservation is not None:
            assert reservation is self.held[handoff]
            self.taken.append(handoff)

    @rule(sender=st.sampled_from([P1, P2]))
    def lose(self, sender):
        self.table.lost(sender)

    @invariant()
    def one_commit_and_one_end_each(self):
        assert len(self.commits) == len(set(self.commits))
        assert len(self.taken) == len(set(self.taken))


TestMachine = pytest.mark.slow(Machine.TestCase)
TestMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
