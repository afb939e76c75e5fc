"""The checker accepts the histories that both roles write during random schedules."""

import inspect
import random

import pytest

from baton.event_journal import History
from tests.support.sessions import D, P
from tests.unit.history.good import TickingClock
from tests.unit.worker.test_roles_together import REQUESTS, TogetherMachine
from tools.history_check import check

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
        for ref, side in ((P, self.pair.prefill), (D, self.pair.decode)):
            history = History.open(str(folder), clock, side.role._info.role.value, ref.worker_id, str(ref.incarnation))
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


@pytest.mark.slow
def test_random_schedules_keep_all_rules_and_have_all_that_can_happen(tmp_path):
    events = []
    for seed in SEEDS:
        Schedule().run(tmp_path / str(seed), seed)
        report = check([tmp_path / str(seed)])
        assert [str(violation) for violation in report.violations] == [], f"seed {seed}"
        events += [event for journal in report.journals for event in journal.events]
    seen, shared = {event.name for event in events}, any(event.facts.get("shared") for event in events)
    wanted = {"reserved", "offered", "committed", "fenced", "adopted", "tokens", "finished", "preempted", "released"}
    wanted |= {"prefill", "repush", "owned", "published", "let_go", "pushed", "failed", "aborted"}
    assert (wanted - seen, shared) == (set(), True)
