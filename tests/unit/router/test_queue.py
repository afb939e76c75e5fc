"""The order of the queue, compared with a model that looks at all waiting requests each time."""

import itertools
import math
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import router.admission.fair_queue
from router.admission.fair_queue import OVERTAKES, Entry, FairQueue, ticket_for

WEIGHTS = {"heavy": 4.0, "light": 0.5}
NAMES = ["heavy", "light", "a", "b"]


@dataclass
class Slow:
    """A direct implementation of the module's docstring."""

    waiting: list[Entry] = field(default_factory=list)
    starts: dict[str, float] = field(default_factory=dict)  # of all tenants so far
    now: float = 0.0

    def weight(self, name):
        return WEIGHTS.get(name, 1.0)

    def of(self, name):
        return [entry for entry in self.waiting if entry.tenant == name]

    @property
    def active(self):
        return sum(self.weight(name) for name in {entry.tenant for entry in self.waiting})

    def rank(self, name):
        back = any(entry.returning for entry in self.of(name))
        return -1.0 if back else self.starts[name], min(entry.ticket for entry in self.of(name))

    def first(self):
        if not self.waiting:
            return None
        tenant = min({entry.tenant for entry in self.waiting}, key=self.rank)
        return min(self.of(tenant), key=lambda entry: entry.ticket)

    def push(self, entry):
        if not self.of(entry.tenant):
            self.starts[entry.tenant] = max(self.starts.get(entry.tenant, 0.0), self.now)
        self.waiting.append(entry)

    def serve(self):
        entry = self.first()
        if not entry.returning:
            self.starts[entry.tenant] += entry.tokens / self.weight(entry.tenant)
            self.now += entry.tokens / self.active
        self.remove(entry)

    def remove(self, entry):
        self.waiting.remove(entry)
        if not self.waiting:
            self.starts, self.now = {}, 0.0
        elif not any(other.returning for other in self.waiting):
            self.now = max(self.now, min(self.starts[other.tenant] for other in self.waiting))

    def ahead(self, entry):
        mine = [e for e in self.of(entry.tenant) if not e.returning and e.ticket[0] < entry.ticket[0]]
        until = max(self.starts[entry.tenant] - self.now, 0) + sum(e.tokens for e in mine) / self.weight(entry.tenant)
        back = sum(e.tokens for e in self.waiting if e.returning)
        return back + min(until * self.active, sum(e.tokens for e in self.waiting) - back - entry.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("returning", [0.0, 0.1])
@settings(max_examples=60, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_the_order_is_that_of_the_model(rng, returning):
    queue, slow = FairQueue[Entry](WEIGHTS), Slow()
    for arrival in range(120):
        act, tokens = rng.choice(["push", "push", "serve", "serve", "remove"]), rng.randint(1, 64)
        if act == "push":
            ticket = ticket_for(arrival, rng.choice((0, 0, 0, 1, 2, -1)))
            entry = Entry(ticket, tokens, rng.choice(NAMES), rng.random() < returning)
            queue.push(entry)
            slow.push(entry)
            assert entry in queue
            if not entry.returning:
                assert queue.ahead(entry) == pytest.approx(slow.ahead(entry))
        elif slow.waiting and act == "serve":
            queue.serve()
            slow.serve()
        elif slow.waiting:
            entry = slow.waiting[tokens % len(slow.waiting)]
            queue.remove(entry)
            slow.remove(entry)
            assert entry not in queue
            with pytest.raises(KeyError):
                queue.remove(entry)
        assert queue.first is slow.first()
        assert (len(queue), queue.tokens) == (len(slow.waiting), sum(entry.tokens for entry in slow.waiting))
        for name in NAMES:
            assert queue.held_by(name) == (len(slow.of(name)), sum(entry.tokens for entry in slow.of(name)))
    assert len(queue._idle) <= len(NAMES)


def test_a_share_leaves_room_for_one_more_tenant_of_weight_1():
    queue = FairQueue[Entry](WEIGHTS)
    assert [queue.share_of(name) for name in ("a", "heavy")] == [1 / 2, 4 / 5]
    queue.push(Entry((0, 0), 10, "a"))
    queue.push(Entry((1, 1), 10, "light"))
    assert [queue.share_of(name) for name in ("a", "light", "heavy")] == [1 / 2.5, 0.5 / 2.5, 4 / 6.5]


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(2, 5))
def test_tenants_that_always_wait_get_their_weights_share(rng, tenants):
    """The service of two tenants, divided by their weights, differs by at most one request of each."""
    weights = {f"t{number}": rng.choice((0.5, 1.0, 2.0, 7.0)) for number in range(tenants)}
    queue, got = FairQueue[Entry](weights), dict.fromkeys(weights, 0.0)
    arrival = 0
    for name in [*weights] * 3:
        queue.push(Entry(ticket_for(arrival := arrival + 1, 0), rng.randint(1, 100), name))
    for _ in range(300):
        served = serve(queue)
        queue.push(Entry(ticket_for(arrival := arrival + 1, 0), rng.randint(1, 100), served.tenant))
        got[served.tenant] += served.tokens / weights[served.tenant]
        for (one, weight), (other, its) in itertools.permutations(weights.items(), 2):
            assert got[one] - got[other] <= 100 / weight + 100 / its + 1e-6


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(["new tenants", "old tenants", "urgent", "mixed"]))
def test_nobody_starves_whatever_comes_later(rng, adversary):
    """As many requests arrive as are served, chosen to delay the victim. The module's docstring states the limit."""
    queue = FairQueue[Entry]({"victim": 0.5, "mine": 4.0})
    arrival = 0
    for name in ["victim", "mine"] * 10:
        queue.push(Entry(ticket_for(arrival := arrival + 1, 0), rng.randint(1, 50), name))
    while serve(queue).tenant != "victim":  # the victim has had its share, and more
        pass
    victim = Entry(ticket_for(arrival := arrival + 1, 0), 50, "victim")
    queue.push(victim)
    most_active = 0.5 + 4 + 25
    until = queue._tenants["victim"].start - queue._now + queue._tenants["victim"].tokens / 0.5
    overtaking = 2 * OVERTAKES * 3 / 0.5 if adversary in {"urgent", "mixed"} else 0  # virtual time of 3 tokens each
    bound = (until + overtaking) * most_active + 50
    for turns in range(int(bound)):
        if serve(queue) is victim:
            return
        kind = rng.choice(["new tenants", "old tenants", "urgent"]) if adversary == "mixed" else adversary
        name = {"new tenants": f"new {turns}", "old tenants": "mine", "urgent": "victim"}[kind]
        arrival += 1
        queue.push(Entry(ticket_for(arrival, 2 * (kind == "urgent")), rng.randint(1, 3), name))
    pytest.fail(f"not served in {bound:.0f} turns")


@pytest.mark.parametrize("leave", ["served", "gone"])
def test_what_is_kept_goes_by_who_waits_and_not_by_who_came(leave):
    """One tenant always waits, so that nothing is reset. 20,000 requests come from it and from tenants that leave."""
    rng, queue = random.Random(3), FairQueue[Entry]({})
    queue.push(Entry((10**9, 10**9), 10**9, "stays"))
    waiting: list[Entry] = []
    for arrival in range(20_000):
        name = f"t{arrival}" if arrival % 2 else "stays"
        waiting.append(Entry(ticket_for(arrival, 0), rng.randint(1, 100), name))
        queue.push(waiting[-1])
        if len(waiting) == 50 and leave == "served":
            waiting.remove(serve(queue))
        elif len(waiting) == 50:
            queue.remove(waiting.pop(rng.randrange(50)))
    assert len(queue) == len(waiting) + 1
    kept = sum(len(tenant.queue) + len(tenant.charges._tree) for tenant in queue._tenants.values())
    assert kept + len(queue._order) + len(queue._idle) < 1000


@pytest.mark.slow
def test_an_operation_takes_steps_like_the_logarithm_of_who_waits():
    """Counts executed lines of the queue's own module, because times vary."""
    few, many = steps(500, 5), steps(20_000, 200)
    assert set(many) == {"push", "ahead", "remove", "serve"}
    for name, count in many.items():
        assert count <= 2.5 * few[name], (name, few, many)
        assert count <= 40 * math.log2(20_000), (name, many)


def steps(waiters, tenants):
    """Return the maximum number of steps by operation."""
    rng = random.Random(5)
    queue, entries = FairQueue[Entry]({}), []
    for arrival in range(waiters):
        tenant = f"t{arrival % tenants if arrival % 2 else 0}"
        entries.append(Entry(ticket_for(arrival, rng.choice((0, 0, 1))), rng.randint(1, 500), tenant))
        queue.push(entries[-1])
    most: dict[str, int] = {}
    for turn in range(50):
        entry = Entry(ticket_for(waiters + turn, rng.choice((0, 100))), 9, f"t{rng.randrange(tenants)}")
        leaver = entries.pop(rng.randrange(len(entries)))
        for name, *operands in (("push", entry), ("ahead", entry), ("remove", leaver), ("serve",)):
            if name != "remove" or leaver in queue:
                most[name] = max(most.get(name, 0), counted(getattr(queue, name), *operands))
        assert len(queue) >= waiters - 2 * turn - 2
    return most


def counted(act, *operands):
    lines, files = 0, {Path(router.admission.fair_queue.__file__).name}

    def trace(frame, event, _):
        nonlocal lines
        lines += event == "line"
        return trace if Path(frame.f_code.co_filename).name in files else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act(*operands)
    finally:
        sys.settrace(before)
    return lines


def serve(queue):
    found = queue.first
    assert found is not None
    queue.serve()
    return found
