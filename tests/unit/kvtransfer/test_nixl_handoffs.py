"""Handoffs over nixl. A stand-in of the library (`tests.support.nixl`) runs in this process."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.core import HandoffId
from baton.errors import ChannelBroken, DigestMismatch
from kvtransfer.transports.nixl import NixlTransport
from tests.support.nixl import Agents, Library
from tests.support.waiting import eventually
from tests.unit.kvtransfer.support import (
    LAYOUT,
    SETTINGS,
    SMALL_FRAMES,
    P,
    Pair,
    Pairs,
    make_kv,
    only_these,
    same_kv,
)

TOKENS = 22
SOURCE, TARGET, NEXT = [5, 9, 2, 40, 33, 1], [7, 3, 60, 11, 12, 13], [30, 31, 32, 33, 34, 35]


@pytest.fixture
def agents() -> Agents:
    return Agents()


@pytest.fixture
def connected(pairs: Pairs, agents: Agents) -> Callable[..., Pair]:
    """A function that makes a pair of workers with private caches."""

    def make(**change) -> Pair:
        ends = [[NixlTransport(SETTINGS, Library(agents), agents.serve)] for _ in range(2)]
        source, target = make_kv(1), make_kv(None)
        return pairs(
            SMALL_FRAMES, source=source, target=target, send=lambda _: ends[0], recv=lambda _: ends[1], **change
        )

    return make


@pytest.mark.parametrize("skip", [0, 5])
def test_the_kv_arrives_through_slots_that_are_used_again(connected, skip: int) -> None:
    pair = connected()
    for n in range(3):
        result = pair.reports.done(pair.push(f"r{n}", TOKENS, SOURCE, TARGET, skip=skip))
    assert (result.transport, result.frames > 2) == ("nixl", True)
    assert same_kv(pair.source, SOURCE, pair.target, TARGET, TOKENS, skip)
    assert only_these(pair.target, TARGET, TOKENS, skip)


def test_bytes_that_change_on_a_network_are_detected_without_any_setting(connected, agents: Agents) -> None:
    pair = connected()
    pair.reports.done(pair.push("right", TOKENS, SOURCE, TARGET))
    agents.flip = agents.pieces
    pair.reports.failed(pair.push("wrong", TOKENS, SOURCE, TARGET), DigestMismatch)
    pair.reports.done(pair.push("next", TOKENS, SOURCE, TARGET))
    assert HandoffId("wrong", 1) not in pair.table.commits


@pytest.mark.parametrize(("fault", "why"), [("dead", "NIXL: NIXL_ERR_REMOTE_DISCONNECT"), ("frozen", "no progress")])
def test_a_source_that_dies_or_freezes_before_a_read_leaves_no_byte_and_no_handoff(
    connected, agents: Agents, fault: str, why: str
) -> None:
    """After a frozen source goes on, a next channel is built. Late bytes of the old one are in its staging alone."""
    pair = connected(receiver=replace(SMALL_FRAMES, frame_deadline_s=0.2))
    job = pair.begin("r", TOKENS, TARGET)
    eventually(lambda: len(pair.sender.channels()) == 1)
    vars(agents)[fault] = True
    pair.sender.computed(job.handoff, SOURCE, LAYOUT.layers, TOKENS)
    pair.reports.failed(job.handoff, ChannelBroken, why)
    assert ("lost", P) in pair.table.events
    agents.dead = agents.frozen = False
    assert only_these(pair.target, [], 0)
    pair.reports.done(pair.push("next", TOKENS, SOURCE, NEXT))
    assert only_these(pair.target, NEXT, TOKENS)
