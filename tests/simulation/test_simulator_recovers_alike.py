"""The simulator's own attempts, recovery and sender, compared with production's: the same deaths in the same phases.

Compared for each attempt: the commands to workers and their order, the known tokens at its start, why it ended, whether
that is a failure or a death, and whether KV is kept for the next one. Then: counted recoveries and the request's end.
Both also check that nothing is left.
"""

from itertools import product
from random import Random

import pytest

from baton.core import Role
from router.request.lifecycle import DEATH_LIMIT
from tests.simulation.stories import ALONE, Case, Phase, Story, Strike
from tests.simulation.told_by_production import told_by_production
from tests.simulation.told_by_simulator import told_by_simulator

BLOWS = [(phase, role) for phase in Phase for role in Role]
HARMLESS = {(Phase.COMMITTED, Role.PREFILL), (Phase.DECODING, Role.PREFILL)}  # no longer needed
TRIPLES = 60  # of 1000


def alike(case: Case) -> Story:
    production, simulator = told_by_production(case), told_by_simulator(case)
    said = f"{', '.join(map(str, case.strikes))}\nproduction: {production}\nsimulator: {simulator}"
    assert production == simulator, said
    return production


def named(blow: tuple[str, Role]) -> str:
    return f"{blow[1]} {blow[0]}"


def test_a_request_that_nothing_disturbs():
    story = alike(Case())
    assert [leg.commands for leg in story.legs.values()] == [["reserve", "prefill"]]
    assert (story.outcomes, story.recoveries) == ({"completed": 1}, {})


@pytest.mark.sample(4)
@pytest.mark.parametrize("first", BLOWS, ids=named)
def test_a_worker_dies_and_then_another_one(first):
    story = alike(Case(strikes=(Strike(1, *first),)))
    assert story.outcomes["completed"] == 1
    assert len(story.legs) == (1 if first in HARMLESS else 2)
    for second in BLOWS if first not in HARMLESS else ():
        story = alike(Case(strikes=(Strike(1, *first), Strike(2, *second))))
        deaths = sum(leg.died for leg in story.legs.values())
        assert story.outcomes == {"failed" if deaths >= DEATH_LIMIT else "completed": 1}


def test_three_workers_die(seed):
    """A request that survives two deaths fails after a third."""
    draw, outcomes = Random(seed), set[str]()
    harmful = [blow for blow in BLOWS if blow not in HARMLESS]
    for blows in draw.sample(list(product(harmful, repeat=3)), TRIPLES):
        first, second, third = (Strike(number, *blow) for number, blow in enumerate(blows, 1))
        if told_by_simulator(Case(strikes=(first, second))).outcomes["completed"]:
            outcomes.update(alike(Case(strikes=(first, second, third))).outcomes)
    assert outcomes == {"failed"}


@pytest.mark.parametrize("phase", [Phase.RESERVED, Phase.COMPUTING, Phase.PUSHING])
def test_both_workers_die(phase):
    """The prefill worker dies first. The decode worker dies before it can answer the Fence."""
    story = alike(Case(strikes=(Strike(1, phase, Role.PREFILL), Strike(1, phase, Role.DECODE))))
    assert story.recoveries == {"decode_lost": 1}
    assert story.legs[1, 2].commands == ["reserve", "prefill"], "a dead worker holds nothing"


@pytest.mark.parametrize("phase", [Phase.RESERVED, Phase.COMPUTING, Phase.PUSHING])
def test_what_was_held_is_not_there_any_more(phase):
    """Dropped KV is no failure: the prompt is computed again, whatever happens then."""
    gone = Strike(1, phase, Role.DECODE), Strike(2, Phase.RESERVED, None)
    story = alike(Case(strikes=gone))
    assert story.recoveries == {"decode_lost": 1, "kv_dropped": 1}
    for blow in BLOWS:
        alike(Case(strikes=(*gone, Strike(3, *blow))))


@pytest.mark.parametrize("first", ALONE)
def test_a_decode_worker_dies_that_computes_the_prompt_as_well(first):
    story = alike(Case(prefill=0, strikes=(Strike(1, first, Role.DECODE),)))
    assert story.recoveries == {"decode_lost": 1}
    for second in ALONE:
        story = alike(Case(prefill=0, strikes=(Strike(1, first, Role.DECODE), Strike(2, second, Role.DECODE))))
        assert story.outcomes == {"failed": 1}, "it may be the reason"


@pytest.mark.parametrize("prefill", [1, 0], ids=["pairs", "colocated"])
def test_a_decode_worker_runs_full(prefill):
    """Preemption is no failure: the later request continues when blocks are free."""
    story = alike(Case(prefill, 1, requests=2, blocks=20))
    assert story.recoveries == {"preempted": 1}
    assert story.outcomes == {"completed": 2}
