"""Choice of the worker that prefills and decodes: the lowest predicted TTFT, including chunked prompts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core import Role
from baton.errors import InvalidRequest
from baton.rpc.v1 import admin_pb2
from router.admin import _sizes
from router.placement.policy import ALONE, POLICIES, Alone, chunked_s, local_prefill
from router.placement.snapshot import BLANK, Ask, Snapshot
from tests.unit.router import fakes
from tests.unit.router.fakes import BUSY, pace

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
    assert local_prefill(snapshot, ask) == Alone(0, found)


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
