"""Local prefill: the cost of its joint step, the required advantage, the break-even that workers' costs imply.

Also the choice among colocated workers, which compute every prompt themselves.
"""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core import BlockCounts, Load, Pace, Role
from baton.errors import InvalidRequest
from baton.rpc.v1 import admin_pb2
from router.admin import _sizes
from router.placement.cost_model import CostModels, WorkerCostModel
from router.placement.policy import ALONE, POLICIES, Alone, Pair, alone_s, chunked_s, local_prefill_if_faster
from router.placement.snapshot import BLANK, Ask, Snapshot
from tests.unit.router import fakes
from tests.unit.router.fakes import BUSY, decode, fleet_of, pace, prefill


def test_what_a_prompt_takes_there():
    usual = 0.008 + 0.0005 * 5 + 1e-6 * 1100
    prompt = 0.002 + 0.0001 * 60 + 1e-7 * sum(range(41, 101))
    found = alone_s(BUSY, 100, 40.0)
    assert found == pytest.approx(usual + (usual + prompt)), "a joint step after the one that runs"
    more = alone_s(BUSY._replace(backlog=300.0), 100, 40.0) - found
    assert more == pytest.approx(300 * 0.0002 + usual), "prompts that wait share it, and are one step before it"
    idle = BUSY._replace(requests=0.0, kv_tokens=0.0)
    assert alone_s(idle, 10, 0.0) == pytest.approx(0.008 + 0.0005 + 1e-5 + 0.002 + 0.001 + 1e-7 * 55), "no wait"
    assert alone_s(BUSY._replace(prompt_step_s=0.0, prompt_token_s=0.0, prompt_context_s=0.0), 10, 0.0) == np.inf


def offered(decodes, cached, ttft_s, slo=np.inf, keep=None, group=0.0):
    """Return the local prefill chosen over a pair with the first of these decode workers."""
    snapshot = Snapshot(groups=2, slo_itl_s=slo)
    for side, rows in ((snapshot.prefill, [BLANK._replace(group=group)]), (snapshot.decode, decodes)):
        for facts in rows:
            side.put(side.add(), facts)
    return local_prefill_if_faster(snapshot, Ask(100, np.zeros(1), np.array(cached), keep=keep), Pair(0, 0, ttft_s))


def test_near_equality_keeps_to_the_pair():
    there = alone_s(BUSY, 100, 0.0)
    assert [offered([BUSY], [0.0], there * times) for times in (0.5, 1.0, 1.1)] == [None] * 3
    assert offered([BUSY], [0.0], there * 1.25) == Alone(0, there)


def test_who_has_most_of_the_prompt_is_asked_too():
    there = alone_s(BUSY, 100, 90.0)
    assert offered([BUSY, BUSY, BUSY], [0.0, 90.0, 50.0], there * 1.2) == Alone(1, there)
    assert offered([BUSY, BUSY._replace(capacity=100.0)], [0.0, 90.0], there * 1.2) is None, "it has no room"
    others = [BUSY._replace(capacity=100.0), BUSY]
    assert offered([BUSY, *others], [0.0, 95.0, 90.0], there * 1.2) == Alone(2, there), "and hides no worker"
    assert offered([BUSY, BUSY._replace(group=1.0)], [0.0, 90.0], there * 1.2) is None, "it has another model"
    assert offered([BUSY], [90.0], there * 1.2, keep=0) is None, "its KV is at the prefill worker"


costs = st.floats(0.0, 0.01)
facts = st.builds(
    BLANK._replace,
    requests=st.integers(0, 9).map(float), backlog=st.sampled_from([0.0, 0.0, 30.0]), kv_tokens=st.floats(0, 1000),
    capacity=st.sampled_from([50.0, 200.0, np.inf]), group=st.sampled_from([0.0, 1.0]), step_s=costs, token_s=costs,
    context_s=st.floats(0, 1e-5), queued_s=costs, prompt_step_s=costs, prompt_token_s=costs,
    prompt_context_s=st.floats(0, 1e-5),
)  # fmt: skip


@given(st.lists(facts, min_size=1, max_size=5), st.data(), st.floats(1e-3, 3.0), st.sampled_from([0.05, 0.3, 1.0]))
def test_it_is_clearly_sooner_within_the_slo_and_where_there_is_room(decodes, data, ttft_s, slo):
    decodes[0] = decodes[0]._replace(capacity=np.inf)
    cached = [float(data.draw(st.integers(0, 99))) for _ in decodes]
    found = offered(decodes, cached, ttft_s, slo=slo, group=decodes[0].group)
    if found is None:
        return
    one, held = decodes[found.decode], cached[found.decode]
    usual = one.step_s + one.token_s * (one.requests + 1) + one.context_s * (one.kv_tokens + 100)
    attended = one.prompt_context_s * sum(range(int(held) + 1, 101))
    prompts = one.prompt_step_s + one.prompt_token_s * (100 - held) + attended + one.backlog * one.queued_s
    assert usual + prompts <= slo * (1 + 1e-9)
    assert usual + prompts <= found.ttft_s * (1 + 1e-9)
    assert found.ttft_s <= 0.85 * ttft_s * (1 + 1e-9)
    assert one.capacity > 100
    assert one.group == decodes[0].group


# --- learned from reports: seconds of a step, of a token, of a position ----------------------------------------------

P, D, PROMPTS = (0.010, 0.00020, 2e-8), (0.006, 0.00040, 5e-8), (0.001, 0.00050, 4e-8)


def cost(true, tokens, context):
    return true[0] + true[1] * tokens + true[2] * context


class Workers:
    """One worker of each role. They report steps with the true costs plus noise."""

    def __init__(self, seed, prompts=PROMPTS):
        self.rng, self.true = random.Random(seed), prompts
        self.links = prefill(), decode(running=4)
        self.fleet = fleet_of(*self.links)
        self.paces = {"prefill_pace": Pace(), "decode_pace": Pace(), "joint_pace": Pace(), "beside_pace": Pace()}

    def step(self, kind, tokens, context, seconds):
        noisy = seconds * self.rng.uniform(0.98, 1.02)
        self.paces[kind] = self.paces[kind].plus(tokens, context, noisy)

    def report(self, *, joint):
        rng = self.rng
        new = rng.randint(8, 800)
        self.step("prefill_pace", new, new * (new + 1) // 2, cost(P, new, new * (new + 1) // 2))
        for _ in range(8):
            beside = rng.randint(1, 12)
            held = beside * rng.randint(50, 1000)
            self.step("decode_pace", beside, held, cost(D, beside, held))
        if joint:
            new, attended = rng.randint(8, 400), rng.randint(0, 300)
            attended = new * attended + new * (new + 1) // 2
            self.step("joint_pace", new, attended, cost(self.true, new, attended) + cost(D, beside, held))
            self.paces["beside_pace"] = self.paces["beside_pace"].plus(beside, held, 0.0)
        self.say()

    def say(self, waiting=0):
        for link, running, kinds in zip(self.links, (0, 4), (("prefill_pace",), list(self.paces)[1:]), strict=True):
            queued = waiting if link.info.role is Role.PREFILL else 0
            load = Load(sum(self.paces[kind].steps for kind in kinds), running, 0, queued)
            blocks = BlockCounts(100, 60, 0, 40)
            given: dict[str, Any] = {kind: self.paces[kind] for kind in kinds}
            link.view.load = replace(load, blocks=blocks, **given)
            self.fleet.touch(link.info.ref)

    def expected(self, tokens):
        """Return the seconds of a prompt on the decode worker, in addition to its decoding."""
        facts = self.fleet.snapshot().decode.facts(0)
        return facts.prompt_step_s + facts.prompt_token_s * tokens + facts.prompt_context_s * tokens * (tokens + 1) / 2

    def break_even(self, waiting):
        """Return the longest prompt for local prefill while `waiting` tokens wait at the prefill worker."""
        self.say(waiting)
        snapshot = self.fleet.snapshot()
        alone = []
        for tokens in range(1, 3000):
            ask = self.fleet.ask(tokens, 0, None, None)
            pair = POLICIES["predicted"](snapshot, ask)
            alone.append(pair is not None and local_prefill_if_faster(snapshot, ask, pair) is not None)
        count = sum(alone)
        assert all(alone[:count]), "what is shorter is computed there too"
        return count


def implied(waiting):
    """Compute the same from the true costs. A waiting token attends to half of an ordinary prompt."""
    told = BLANK._replace(
        requests=4.0, kv_tokens=640.0, step_s=D[0], token_s=D[1], context_s=D[2],
        prompt_step_s=PROMPTS[0], prompt_token_s=PROMPTS[1], prompt_context_s=PROMPTS[2],
    )  # fmt: skip

    def sooner(tokens):
        pair = waiting * (P[1] + P[2] * 270) + 2 * P[0] + P[1] * tokens + P[2] * tokens * (tokens + 1) / 2
        return alone_s(told, tokens, 0.0) < 0.85 * pair

    return next(tokens for tokens in range(1, 3000) if not sooner(tokens)) - 1


@pytest.mark.parametrize(("seed", "waiting"), [(0, 200), (1, 400)])
def test_the_break_even_is_the_one_that_costs_imply(seed, waiting):
    workers = Workers(seed)
    for _ in range(150):
        workers.report(joint=workers.rng.random() < 0.4)
    assert workers.break_even(waiting) == pytest.approx(implied(waiting), rel=0.1)


def test_what_was_never_tried_is_taken_to_cost_what_it_does_at_a_prefill_worker():
    workers = Workers(1)
    for _ in range(50):
        workers.report(joint=False)
    assert workers.expected(100) == pytest.approx(cost(P, 100, 5050), rel=0.1)


def test_prompts_that_turned_out_dear_are_tried_again_in_the_end():
    workers = Workers(2, prompts=(0.2, 0.01, 0.0))
    for _ in range(50):
        workers.report(joint=True)
    assert workers.expected(100) == pytest.approx(1.2, rel=0.1)
    for _ in range(9000):
        workers.report(joint=False)
    assert workers.expected(100) == pytest.approx(cost(P, 100, 5050), rel=0.3)


def test_steps_with_prompts_alone_tell_too():
    """The decode worker has no sequences to decode at that time."""
    one = WorkerCostModel(Role.DECODE, CostModels())
    for number in range(1, 60):
        only = pace(number, 100, 5050, 0.009, 0.0003)
        assert one.update(Load(step=20 * number, decode_pace=pace(10 * number, 4, 400, 0.004), prefill_pace=only))
    assert one.prompts.of(100, 5050) == pytest.approx(0.039 - one.cost.step_s, rel=0.05)


def test_a_prompt_costs_something_whatever_is_reported():
    """Steps with prompts are reported as faster than those without."""
    one = WorkerCostModel(Role.DECODE, CostModels())
    one.update(Load(step=10, decode_pace=pace(10, 4, 400, 0.01)))
    one.update(Load(step=30, decode_pace=pace(10, 4, 400, 0.01), joint_pace=pace(10, 50, 1275, 0.001)))
    assert one.prompts.known


# --- colocated workers: the one with the lowest predicted TTFT, including chunked prompts

USUAL = 0.008 + 0.0005 * 5 + 1e-6 * 1600  # a decode step with one more sequence of 600 tokens


def among(rows, tokens=600, cached=None, chunk=np.inf, slo=np.inf, turn=0):
    snapshot = Snapshot(groups=1, slo_itl_s=slo, chunk=chunk)
    for order, facts in enumerate(rows):
        snapshot.decode.put(snapshot.decode.add(), facts._replace(order=order))
    return snapshot, Ask(tokens, np.zeros(0), np.array(cached or [0.0] * len(rows)), turn)


def local_ttft_s(snapshot, ask):
    return chunked_s(snapshot.decode.at, ask.tokens, ask.decode_cached, snapshot.chunk)


def chosen(policy, *rows, **facts):
    found = policy(*among(rows, **facts))
    return None if found is None else found.decode


def prompt_s(steps, new, backlog=0.0):
    context = new * (600 - new + (new + 1) / 2)
    return 0.002 * steps + 0.0001 * new + 0.0002 * backlog + 1e-7 * context


@pytest.mark.parametrize(
    ("cached", "backlog", "chunk", "steps"),
    [
        (0.0, 0.0, np.inf, 1),
        (0.0, 0.0, 604.0, 1),  # four tokens of the chunk are for decoding sequences
        (0.0, 0.0, 603.0, 2),
        (0.0, 0.0, 104.0, 6),
        (500.0, 0.0, 104.0, 1),
        (500.0, 300.0, 104.0, 4),  # after the waiting prompts
        (0.0, 0.0, 2.0, 600),  # at least one token a step
    ],
)
def test_a_prompt_takes_as_many_steps_as_it_has_chunks(cached, backlog, chunk, steps):
    snapshot, ask = among([BUSY._replace(backlog=backlog)], cached=[cached], chunk=chunk)
    (found,) = local_ttft_s(snapshot, ask)
    expected = USUAL * (steps + 1) + prompt_s(steps + 1, 600 - cached, backlog)
    assert found == pytest.approx(expected), "and the step that runs"
    assert ALONE["predicted"](snapshot, ask) == Alone(0, found)


def test_at_one_that_does_nothing_no_step_is_waited_for():
    snapshot, ask = among([BUSY._replace(requests=0.0, kv_tokens=0.0)])
    assert local_ttft_s(snapshot, ask)[0] == pytest.approx(0.008 + 0.0005 + 0.0006 + prompt_s(1, 600))


MANY_SHORT, ONE_LONG = BUSY._replace(requests=6.0, backlog=50.0), BUSY._replace(requests=2.0, backlog=4000.0)
BEHIND, NEARLY = BUSY._replace(backlog=4000.0), BUSY._replace(requests=5.0)
SLOW, LATE = BUSY._replace(kv_tokens=9e4, prompt_token_s=0.0, queued_s=0.0), BUSY._replace(backlog=5e4)
CACHED = {"cached": [0.0, 560.0], "chunk": 128.0}


@pytest.mark.parametrize(
    ("policy", "rows", "facts", "row"),
    [
        ("predicted", (ONE_LONG, MANY_SHORT), {"chunk": 256.0}, 1),  # waiting tokens count, not requests
        ("least_loaded", (ONE_LONG, MANY_SHORT), {}, 0),
        ("predicted", (BUSY, BUSY), CACHED, 1),  # a cached prefix decides until too much is queued before it
        ("predicted", (BUSY, BEHIND), CACHED, 0),
        ("prefix", (BUSY, BUSY), CACHED, 1),
        ("prefix", (BUSY, BUSY._replace(requests=20.0)), CACHED, 0),
        ("predicted", (BUSY._replace(step_s=0.012), NEARLY), {}, 0),  # near-ties go to fewer requests
        ("predicted", (BUSY._replace(step_s=0.1), NEARLY), {}, 1),
        ("predicted", (SLOW, LATE), {"slo": 0.11}, 0),  # a worker that decodes too slowly is skipped
        ("predicted", (SLOW, LATE), {"slo": 0.05}, 1),
    ],
)
def test_who_is_chosen(policy, rows, facts, row):
    assert chosen(ALONE[policy], *rows, **facts) == row


@pytest.mark.parametrize("policy", ALONE.values(), ids=ALONE)
def test_of_what_nothing_is_known_requests_are_spread(policy):
    rows = [BLANK._replace(able=1.0, capacity=1e6)] * 3
    for turn in range(9):
        row = chosen(policy, *rows, turn=turn)
        rows[row] = rows[row]._replace(requests=rows[row].requests + 1)
    assert [row.requests for row in rows] == [3.0, 3.0, 3.0]


rooms = st.lists(st.sampled_from([-1.0, 100.0, 600.0, 601.0, np.inf]), max_size=5)


@pytest.mark.parametrize("policy", ALONE.values(), ids=ALONE)
@given(rooms, st.integers(0, 9), st.sampled_from([np.inf, 64.0]), st.sampled_from([np.inf, 0.001]))
def test_one_with_room_is_found_whenever_there_is_one(policy, drawn, turn, chunk, slo):
    row = chosen(policy, *(BUSY._replace(capacity=room) for room in drawn), turn=turn, chunk=chunk, slo=slo)
    able = [at for at, room in enumerate(drawn) if room > 600]
    assert (row in able) if able else row is None


# --- in a router -----------------------------------------------------------------------------------------------------

STEPS = pace(100, 4, 2000, step_s=0.02, token_s=0.002)
JOINT = pace(50, 60, 9000, step_s=0.03, token_s=0.0005)


def floor_of(*links, **settings):
    return fakes.floor_of(*links, colocated=True, chunk=128.0, **settings)


def worker(name, **facts):
    return fakes.decode(name, pace=STEPS, prompts=JOINT, beside=pace(50, 4, 2000), **facts)


def test_each_policy_has_its_like_here():
    assert set(ALONE) == set(POLICIES)
    assert {floor_of(policy=name).pool._options.alone for name in ALONE} == set(ALONE.values())


def test_one_worker_does_it_all_though_another_could_prefill():
    """A prefill worker of an earlier plan is not used, and none is required."""
    pool = floor_of(worker("a"), worker("b"), fakes.prefill("p")).pool
    placements = [pool.place(100), pool.place(100)]
    assert {placement.decode.info.ref.worker_id for placement in placements} == {"a", "b"}
    assert [placement.prefill for placement in placements] == [None, None]
    assert all(fakes.predicted_ttft_s(placement) for placement in placements)
    assert [link.view.prefill_backlog for link in pool.links if link.info.role is Role.DECODE] == [100, 100]
    assert [pool.note(link) for link in floor_of(worker("a")).pool.links] == [""]
    assert floor_of(worker("a")).pool.can_serve()


def test_what_a_typical_prompt_may_expect_is_that_of_the_worker_that_it_would_get():
    context = floor_of(worker("a", running=3, reported=4000), worker("b", running=2, reported=900))
    placement = context.pool.place(300)
    snapshot, ask = context.pool._fleet.snapshot(), context.pool._fleet.ask(300, 0, None, None)
    report = context.pool.expected()
    assert placement.decode.info.ref.worker_id == "b"
    assert report.ttft_s == pytest.approx(local_ttft_s(snapshot, ask).min())
    assert 0 < report.ttft_alone_s < report.ttft_s / 2


def test_a_pool_that_there_is_not_cannot_be_scaled():
    bounds = {Role.DECODE: (1, 4)}
    assert _sizes(admin_pb2.ScaleRequest(decode=3), bounds) == {"decode": 3}
    for size in (0, 1):
        with pytest.raises(InvalidRequest, match=r"prefill: .*mode: colocated"):
            _sizes(admin_pb2.ScaleRequest(prefill=size), bounds)
