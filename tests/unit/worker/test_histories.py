"""Histories of both roles: a handoff, a repush after a broken channel, and a fence, as the checker accepts them."""

import pytest

from baton.core import HandoffId
from baton.event_journal import History
from tests.support.sessions import H, fence, next_of, release, repush, reserve
from tests.support.workers import Pair
from tests.unit.history.good import TickingClock
from tools.history_check import check

AGAIN, FENCED = HandoffId("again", 1), HandoffId("fenced", 1)


@pytest.fixture
def pair(tmp_path):
    """Yield two workers that write histories, and close these afterwards."""
    pair, clock, histories = Pair(), TickingClock(), []
    for side in (pair.prefill, pair.decode):
        role, ref = side.role._info.role.value, side.role._info.ref
        history = History.open(str(tmp_path), clock, role, ref.worker_id, str(ref.incarnation))
        history.note("registered")
        histories.append(history)
        side.engine.pool.history = side.role._history = history
    pair.prefill.role.fetches._history, pair.decode.role.reservations._history = histories
    yield pair
    for history in histories:
        history.close()


def test_each_step_of_a_handoff_is_noted_and_breaks_no_rule(pair, router, tmp_path):
    pair.hand_over(router, upto="reported")
    pair.decode.run()
    pair.begin(router, AGAIN)
    pair.prefill.run()
    pair.prefill.pusher.break_channel(pair.decode)
    pair.decode.take(router, release(AGAIN))
    pair.prefill.run()
    pair.decode.take(router, reserve(next_of(AGAIN)))
    pair.prefill.take(router, repush(AGAIN))
    pair.end_pushes()
    pair.decode.run()
    pair.decode.take(router, reserve(FENCED), fence(FENCED))
    pair.ends_free()
    assert all("finish" in router.kinds(handoff) for handoff in (H, next_of(AGAIN)))
    report = check([tmp_path])
    assert [str(violation) for violation in report.violations] == []
    seen = {event.name for journal in report.journals for event in journal.events}
    wanted = {"reserved", "offered", "committed", "fenced", "adopted", "tokens", "finished", "released"}
    assert wanted | {"prefill", "repush", "owned", "published", "let_go", "pushed", "failed"} <= seen
