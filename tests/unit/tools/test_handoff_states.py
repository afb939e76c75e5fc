"""The exhaustive check of the handoff, with small bounds: no violation, and planted bugs are found."""

import random

import pytest

from tools.handoff_states.bugs import BUGS
from tools.handoff_states.explore import possible, root, search_here
from tools.handoff_states.states import replaced

pytestmark = pytest.mark.slow
SEED = 1
DRAWN = random.Random(SEED).sample(BUGS, 4)


def test_the_handoff_keeps_its_invariants_in_each_state():
    with replaced():
        found = search_here(events=2, faults=1, seconds=600)
    assert not found.violation, f"{found.violation} after {found.path}"
    assert found.complete
    assert found.states > 500


def test_a_command_to_a_dead_worker_is_not_copied():
    """Its stream names the incarnation, so no successor of the worker receives it."""
    with replaced():
        world = root(faults=2, number=1)
        for event in (("die_p", 0), ("from_d", 0)):
            world.apply(event)
        assert world.link_p.down, "a Prefill is on its way to the dead worker"
        assert ("copy_to_p", 0) not in possible(world)


@pytest.mark.parametrize("bug", DRAWN, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug):
    with replaced(), bug.planted():
        assert search_here(events=6, faults=1, seconds=600).violation


def test_each_bug_can_be_planted():
    """`planted` raises an error if the product's source has changed."""
    for bug in BUGS:
        with bug.planted():
            method = vars(bug.owner)[bug.method]
        assert vars(bug.owner)[bug.method] is not method
