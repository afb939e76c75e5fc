"""What both roles note of random schedules holds for the checker."""

import random

import pytest

from baton.core import HandoffId, Sampling
from baton.history import History
from tests.support.sessions import D, FakeSession, P, fence, names_of, prefill, release, repush, reserve, spec_of
from tests.support.workers import Pair
from tests.unit.history.good import TickingClock
from tools.history_check import check

REQUESTS = "abcdef"
SEEDS, ACTS = range(12), 500
ACTIONS = ["begin"] * 6 + ["go_on"] * 12 + ["advance"] * 24 + ["fence", "release", "repush", "leave", "cut", "wait"]


class Schedule:
    """A pair of workers that keep their histories, two routers, and what may happen to them."""

    def __init__(self, folder, seed):
        self.choose, clock = random.Random(seed), TickingClock()
        self.pair = Pair(self.choose.randint(8, 14), self.choose.randint(7, 14))
        self.routers = [[FakeSession(name), FakeSession(name)] for name in ("router-a", "router-b")]
        self.attempts, self.specs = dict.fromkeys(REQUESTS, 0), {}
        self.histories = []
        for ref, role, side in ((P, "prefill", self.pair.prefill), (D, "decode", self.pair.decode)):
            history = History.open(str(folder), clock, role, ref.worker_id, str(ref.incarnation))
            history.note("registered")
            self.histories.append(history)
            side.engine.pool.history = side.role._history = history
        self.pair.prefill.role.fetches._history = self.histories[0]
        self.pair.decode.role.reservations._history = self.histories[1]

    def run(self, actions):
        for _ in range(actions):
            self.act(self.choose.choice(ACTIONS))
        for p, d in self.routers:
            self.pair.prefill.role.gone(p)
            self.pair.decode.role.gone(d)
        while self.pair.prefill.pusher.pushes:
            self.advance()
        self.go_on(40)
        for history in self.histories:
            history.close()

    def act(self, action):
        request, router = self.choose.choice(REQUESTS), self.choose.choice(self.routers)
        handoff = HandoffId(request, max(1, self.attempts[request] - self.choose.randint(0, 1)))
        match action:
            case "begin":
                self.begin(request, router)
            case "go_on":
                self.go_on(self.choose.randint(1, 4))
            case "advance":
                self.advance()
            case "fence":
                self.pair.decode.take(router[1], fence(handoff))
            case "release":
                self.pair.prefill.take(router[0], release(handoff))
                self.pair.decode.take(router[1], release(handoff))
            case "repush":
                self.repush(handoff, router)
            case "leave":
                self.pair.decode.role.gone(router[1])
                router[1] = FakeSession(router[1].router_id)
            case "cut":
                self.pair.prefill.pusher.break_channel(self.pair.decode)
            case "wait":
                self.pair.clock.advance(2.0)

    def begin(self, request, router):
        """Beginnings are shared, so that blocks are."""
        self.attempts[request] += 1
        length = 6 + 3 * REQUESTS.index(request)
        sampling = Sampling(max_tokens=self.choose.choice([1, 6, 30]), temperature=0.0, ignore_eos=True)
        handoff = HandoffId(request, self.attempts[request])
        self.specs[request] = spec_of(HandoffId("all", 1), length, sampling)
        if (skip := self.reserve(handoff, router)) is not None:
            self.pair.prefill.take(router[0], prefill(handoff, self.specs[request], skip=skip))

    def reserve(self, handoff, router):
        spec = self.specs[handoff.request_id]
        self.pair.decode.take(router[1], reserve(handoff, len(spec), prefix=names_of(spec.tokens)))
        return router[1].cached_at(handoff)

    def repush(self, held, router):
        """Of a request that was begun; most of the time nothing is held of it."""
        if held.request_id in self.specs:
            self.attempts[held.request_id] += 1
            new = HandoffId(held.request_id, self.attempts[held.request_id])
            if (skip := self.reserve(new, router)) is not None:
                self.pair.prefill.take(router[0], repush(held, new, skip=skip))

    def go_on(self, rounds):
        for _ in range(rounds):
            self.pair.prefill.step()
            self.pair.decode.step()

    def advance(self):
        if handoffs := list(self.pair.prefill.pusher.pushes):
            self.pair.prefill.pusher.advance(self.choose.choice(handoffs), self.pair.decode)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The histories of all schedules."""
    made = tmp_path_factory.mktemp("histories")
    for seed in SEEDS:
        Schedule(made / str(seed), seed).run(ACTS)
    return [made / str(seed) for seed in SEEDS]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_schedules_keep_all_rules(folders, seed):
    assert [str(violation) for violation in check([folders[seed]]).violations] == []


def test_the_schedules_have_all_that_can_happen(folders):
    report = check(folders)
    seen = {event.name for journal in report.journals for event in journal.events}
    shared = any(event.facts.get("shared") for journal in report.journals for event in journal.events)
    wanted = {"reserved", "offered", "committed", "fenced", "adopted", "tokens", "finished", "preempted", "released"}
    wanted |= {"prefill", "repush", "owned", "published", "let_go", "pushed", "failed", "aborted"}
    assert (wanted - seen, shared) == (set(), True)
