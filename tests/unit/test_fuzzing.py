"""The targets of tools/fuzz_parse.py hold for their seeds, changed seeds, and some drawn inputs."""

import random

import pytest

from tests.fuzzing.targets import TARGETS

CHANGES = 20


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_takes_its_seeds_and_changes_of_them(name):
    chance = random.Random(7)
    for seed in TARGETS[name].seeds:
        TARGETS[name](b"\0" + seed)
        for _ in range(CHANGES):
            at, size = chance.randrange(len(seed)), chance.randrange(4)
            TARGETS[name](b"\0" + seed[:at] + chance.randbytes(size) + seed[at + size :])


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_takes_what_is_drawn(name):
    TARGETS[name].drawn()
    TARGETS[name](b"\1" + random.Random(7).randbytes(999))
