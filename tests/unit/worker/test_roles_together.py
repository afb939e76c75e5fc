"""A prefill and a decode role in one thread: hypothesis searches for an order of events that breaks a guarantee.

Routers reserve, prefill, repush, fence, release and disconnect. Pushes advance during the prompt, report late, or lose
their channel. Small pools cause rejections and preemptions. The oracle's tokens depend on every byte of KV.
"""

import functools
import inspect
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.core import HandoffId, Sampling
from baton.event_journal import History
from decode_workers.reservations import State
from tests.support.sessions import FakeSession, expected, fence, names_of, prefill, release, repush, reserve, spec_of
from tests.support.workers import Pair
from tests.unit.history.good import TickingClock
from tools.history_check import check

REQUESTS = "abcd"
P_ENDS = {"pushed", "failed", "finish"}
D_ENDS = {"finish", "preempted", "failed", "fenced"}
requests, numbers = st.sampled_from(REQUESTS), st.integers(0, 3)


@functools.cache
def spec_for(request):
    """`a` ends with its first token, the others grow past a block. `c` is sampled, others are greedy. `d` is urgent."""
    index = REQUESTS.index(request)
    sampling = Sampling(max_tokens=1 + 4 * index, temperature=float(index == 2), seed=5, ignore_eos=index != 3)
    return replace(spec_of(HandoffId(request, 1), 5 + 3 * index, sampling), priority=int(request == "d"))


@functools.cache
def known_answer(request):
    return expected(spec_for(request))


class Router:
    """A router's streams to both workers. A broken one is replaced, as a link does."""

    def __init__(self, name):
        self.name = name
        self.p, self.d = FakeSession(name), FakeSession(name)


class TogetherMachine(RuleBasedStateMachine):
    @initialize(
        decode_blocks=st.integers(7, 20),
        prefill_blocks=st.integers(6, 12),
        block_size=st.sampled_from([2, 4, 4]),
        budget=st.sampled_from([3, 2048]),
    )
    def start(self, decode_blocks, prefill_blocks, block_size, budget):
        blocks = decode_blocks * 4 // block_size
        self.pair = Pair(prefill_blocks, blocks, decode_block_size=block_size, max_batched_tokens=budget)
        self.routers = [Router("router-a"), Router("router-b")]
        self.sessions = [(r.p, r.d) for r in self.routers]
        self.attempts = dict.fromkeys(REQUESTS, 0)

    # --- routers

    @rule(request=requests, router=st.integers(0, 1), deadline_s=st.sampled_from([0.0, 3.0]))
    def begin(self, request, router, deadline_s):
        """Start the next attempt: reserve, and prefill if there is capacity."""
        self.attempts[request] += 1
        handoff, spec, router = HandoffId(request, self.attempts[request]), spec_for(request), self.routers[router]
        cached = self.reserve(router, handoff, deadline_s)
        if cached is not None:
            self.pair.prefill.take(router.p, prefill(handoff, spec, deadline_s=deadline_s, skip=cached))

    def reserve(self, router, handoff, deadline_s=0.0):
        """Return the cached tokens, or None after a rejection."""
        spec = spec_for(handoff.request_id)
        prefix = names_of(spec.tokens, self.pair.decode.engine.layout.block_size)
        self.pair.decode.take(router.d, reserve(handoff, len(spec), deadline_s=deadline_s, prefix=prefix))
        return router.d.cached_at(handoff) if router.d.kinds(handoff) == ["reserved"] else None

    @rule(request=requests, router=st.integers(0, 1), back=numbers, deadline_s=st.sampled_from([0.0, 3.0]))
    def push_again(self, request, router, back, deadline_s):
        """Repush an earlier attempt, which the prefill worker holds or has freed."""
        held, router = self.one_of(request, back), self.routers[router]
        self.pair.decode.take(router.d, release(held))
        self.attempts[request] = max(self.attempts[request], 1) + 1
        handoff = HandoffId(request, self.attempts[request])
        if (cached := self.reserve(router, handoff, deadline_s)) is not None:
            computed = self.pair.prefill.engine.counters.prefill_tokens
            self.pair.prefill.take(router.p, repush(held, handoff, deadline_s=deadline_s, skip=cached))
            assert self.pair.prefill.engine.counters.prefill_tokens == computed

    @rule(request=requests, router=st.integers(0, 1), back=numbers)
    def prefill_late_or_again(self, request, router, back):
        handoff = self.one_of(request, back)
        self.pair.prefill.take(self.routers[router].p, prefill(handoff, spec_for(request)))

    @rule(request=requests, router=st.integers(0, 1), back=numbers)
    def reserve_again(self, request, router, back):
        """Only an attempt rejected for capacity may be retried, while no later one was seen."""
        handoff, session = self.one_of(request, back), self.routers[router].d
        seen = any({"reserved", "fenced"} & set(d.kinds(handoff)) for _, d in self.sessions)
        self.pair.decode.take(session, reserve(handoff, len(spec_for(request))))
        self.attempts[request] = max(self.attempts[request], 1)
        assert session.kinds(handoff)[-1] == "refused" or not seen

    @rule(request=requests, router=st.integers(0, 1), back=numbers)
    def fence(self, request, router, back):
        handoff, session = self.one_of(request, back), self.routers[router].d
        adopted, said = self.adopted(handoff), session.kinds(handoff).count("fenced")
        self.pair.decode.take(session, fence(handoff))
        assert self.adopted(handoff) == adopted  # a commit is final
        assert session.kinds(handoff).count("fenced") == said + (not adopted and not self.committed(handoff))
        self.attempts[request] = max(self.attempts[request], 1)

    @rule(request=requests, router=st.integers(0, 1), back=numbers, sides=st.sampled_from(["p", "d", "pd"]))
    def release(self, request, router, back, sides):
        handoff = self.one_of(request, back)
        if "p" in sides:
            self.pair.prefill.take(self.routers[router].p, release(handoff))
        if "d" in sides:
            self.pair.decode.take(self.routers[router].d, release(handoff))

    @rule(router=st.integers(0, 1), sides=st.sampled_from(["p", "d", "pd"]))
    def lose_streams(self, router, sides):
        lost, fresh = self.routers[router], Router(self.routers[router].name)
        if "p" in sides:
            self.pair.prefill.loop.submit(functools.partial(self.pair.prefill.role.gone, lost.p))
            lost.p = fresh.p
        if "d" in sides:
            self.pair.decode.loop.submit(functools.partial(self.pair.decode.role.gone, lost.d))
            lost.d = fresh.d
        self.sessions.append((lost.p, lost.d))

    # --- progress

    @rule(times=st.integers(1, 4))
    def step_prefill(self, times):
        self.pair.prefill.step(times)

    @rule(times=st.integers(1, 4))
    def step_decode(self, times):
        self.pair.decode.step(times)

    @rule(number=numbers, stages=st.integers(1, 4))
    def advance_a_push(self, number, stages):
        pusher = self.pair.prefill.pusher
        for _ in range(stages):
            if handoffs := list(pusher.pushes):
                pusher.advance(handoffs[number % len(handoffs)], self.pair.decode)

    @rule(rounds=st.integers(1, 6))
    def all_goes_on(self, rounds):
        for _ in range(rounds):
            self.pair.prefill.step()
            for handoff in list(self.pair.prefill.pusher.pushes):
                self.pair.prefill.pusher.advance(handoff, self.pair.decode)
            self.pair.decode.step()

    @rule(request=requests, router=st.integers(0, 1), rounds=st.integers(3, 12))
    def begin_and_go_on(self, request, router, rounds):
        self.begin(request, router, 0.0)
        self.all_goes_on(rounds)

    @rule()
    def break_the_channel(self):
        self.pair.prefill.pusher.break_channel(self.pair.decode)

    @rule(seconds=st.sampled_from([1.0, 5.0]))
    def time_passes(self, seconds):
        self.pair.clock.advance(seconds)

    # --- guarantees

    @invariant()
    def no_block_is_lost(self):
        for side in (self.pair.prefill, self.pair.decode):
            side.counts.check()
        held = sum(len(entry.reservation.own) for entry in self.pair.decode.role.reservations._entries.values())
        assert self.pair.decode.counts.reserved == held
        assert self.pair.prefill.counts.reserved == 0

    @invariant()
    def each_handoff_ends_once_on_each_side(self):
        reports = self.pair.prefill.pusher.reports
        assert len(reports) == len(set(reports))
        for p, d in self.sessions:
            for handoff in self.handoffs():
                once([kind for kind in kinds_of(p, handoff) if kind != "held"], P_ENDS, "refused")
                assert p.kinds(handoff).count("pushed") + kinds_of(p, handoff).count("held") <= 1
                once(d.kinds(handoff), D_ENDS, "refused")

    @invariant()
    def the_tokens_are_right(self):
        for p, d in self.sessions:
            for handoff in self.handoffs():
                answer = known_answer(handoff.request_id)
                assert p.ids(handoff) in ([], answer[:1])
                kinds, tokens = d.kinds(handoff), d.ids(handoff)
                assert tokens == answer[: len(tokens)]
                assert bool(tokens) == ({"committed", "reserved"} <= set(kinds))
                if "finish" in kinds:
                    assert tokens == answer

    def teardown(self):
        if not hasattr(self, "pair"):
            return
        for router in self.routers:
            self.pair.prefill.role.gone(router.p)
            self.pair.decode.role.gone(router.d)
        self.pair.end_pushes()
        for side in (self.pair.prefill, self.pair.decode):
            side.run()
            assert side.all_free
            assert not side.engine._requests
        assert len(self.pair.decode.role.reservations) == 0
        assert not any(session.handoffs for pair in self.sessions for session in pair)
        assert self.pair.decode.engine.counters.prefill_tokens == 0
        assert self.pair.prefill.engine.counters.decode_tokens == 0
        self.each_handoff_ends_once_on_each_side()
        self.the_tokens_are_right()

    def adopted(self, handoff):
        job = self.pair.decode.role._work.get(handoff)
        return job is not None and job.adopted

    def committed(self, handoff):
        """Return whether the commit was accepted and waits for the engine thread."""
        entry = self.pair.decode.role.reservations._entries.get(handoff)
        return entry is not None and entry.state is State.COMMITTED

    def one_of(self, request, back):
        return HandoffId(request, max(1, self.attempts[request] - back))

    def handoffs(self):
        return [HandoffId(r, attempt) for r, last in self.attempts.items() for attempt in range(1, last + 1)]


def kinds_of(session, handoff):
    """Return event kinds. "held" is a failure that keeps the KV; another end of the prompt may follow it."""
    return ["held" if event.failed.held else event.WhichOneof("event") for event in session.told(handoff)]


def once(kinds, ends, refusal):
    """Check that a handoff ends once. Afterwards it only answers fences and rejects repetitions."""
    kinds = [kind for kind in kinds if kind != refusal]
    found = [kind for kind in kinds if kind in ends and kind != "fenced"]
    assert len(found) <= 1, kinds
    if found:
        assert set(kinds[kinds.index(found[0]) + 1 :]) <= {"fenced"}, kinds


TestTogether = pytest.mark.slow(TogetherMachine.TestCase)
TestTogether.settings = settings(
    report_multiple_bugs=False,
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


# --- the checker accepts the histories that both roles write during random schedules

SEEDS, ACTS = range(12), 500
ACTIONS = {
    "begin": 6,
    "all_goes_on": 3,
    "step_prefill": 6,
    "step_decode": 6,
    "advance_a_push": 12,
    **dict.fromkeys(("fence", "release", "push_again", "lose_streams", "break_the_channel", "time_passes"), 1),
}


class Schedule(TogetherMachine):
    def run(self, folder, seed):
        choose, clock = random.Random(seed), TickingClock()
        self.start(choose.randint(7, 14), choose.randint(8, 14), 4, 2048)
        histories = []
        for side in (self.pair.prefill, self.pair.decode):
            role, ref = side.role._info.role.value, side.role._info.ref
            history = History.open(str(folder), clock, role, ref.worker_id, str(ref.incarnation))
            history.note("registered")
            histories.append(history)
            side.engine.pool.history = side.role._history = history
        self.pair.prefill.role.fetches._history, self.pair.decode.role.reservations._history = histories
        for name in choose.choices(list(ACTIONS), list(ACTIONS.values()), k=ACTS):
            act, some = getattr(self, name), choose.randint
            drawn = {"request": choose.choice(REQUESTS), "router": some(0, 1), "back": some(0, 1), "number": some(0, 3)}
            drawn |= {"deadline_s": 0.0, "sides": "pd", "seconds": 2.0}
            drawn |= {"times": some(1, 4), "stages": 1, "rounds": some(1, 4)}
            act(**{what: drawn[what] for what in inspect.signature(act).parameters})
        self.teardown()
        for history in histories:
            history.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Run each schedule once and check its histories."""
    folders = [tmp_path_factory.mktemp("histories") for _ in SEEDS]
    for seed, folder in enumerate(folders):
        Schedule().run(folder, seed)
    return [check([folder]) for folder in folders]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[1:])])
def test_random_schedules_keep_all_rules(reports, seed):
    assert [str(violation) for violation in reports[seed].violations] == []


def test_the_schedules_have_all_that_can_happen(reports):
    events = [event for report in reports for journal in report.journals for event in journal.events]
    seen, shared = {event.name for event in events}, any(event.facts.get("shared") for event in events)
    wanted = {"reserved", "offered", "committed", "fenced", "adopted", "tokens", "finished", "preempted", "released"}
    wanted |= {"prefill", "repush", "owned", "published", "let_go", "pushed", "failed", "aborted"}
    assert (wanted - seen, shared) == (set(), True)
