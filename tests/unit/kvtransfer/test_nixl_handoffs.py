"""Handoffs over nixl. A stand-in of the library (`tests.support.nixl`) runs in this process."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.core import HandoffId
from baton.errors import ChannelBroken, DigestMismatch
from kvtransfer.transports.nixl import NixlTransport
from kvtransfer.wire import VersionRefused
from tests.support.nixl import Agents, Library, held_by
from tests.support.time_factor import scaled
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
    rows,
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
    agents.flip = agents.segments
    pair.reports.failed(pair.push("wrong", TOKENS, SOURCE, TARGET), DigestMismatch)
    pair.reports.done(pair.push("next", TOKENS, SOURCE, TARGET))
    assert HandoffId("wrong", 1) not in pair.table.commits


STRIKES = {
    "dead": lambda pair, agents: setattr(agents, "dead", True),
    "frozen": lambda pair, agents: setattr(agents, "frozen", True),
    "closed": lambda pair, agents: pair.sender._channels[0].stop("closed by the test"),
}


@pytest.mark.parametrize("at", [0, 1, 7, 12])
@pytest.mark.parametrize("fault", STRIKES)
def test_a_source_that_dies_freezes_or_closes_within_a_read(connected, agents: Agents, fault: str, at: int) -> None:
    """The handoff fails, and blocks have right bytes or none. The next channel works, and no staging is kept."""
    deadline_s = scaled(1.0) if fault == "frozen" else SMALL_FRAMES.frame_deadline_s
    pair = connected(receiver=replace(SMALL_FRAMES, frame_deadline_s=deadline_s))
    (transport,) = pair.sender._end.choice.transports
    staging, _ = transport._served
    job = pair.begin("r", TOKENS, TARGET)
    eventually(lambda: len(pair.sender.channels()) == 1)
    strike_at = agents.segments + at

    def before(segment: int) -> None:
        if segment == strike_at:
            STRIKES[fault](pair, agents)

    agents.before = before
    pair.sender.computed(job.handoff, SOURCE, LAYOUT.layers, TOKENS)
    pair.reports.failed(job.handoff, ChannelBroken)
    eventually(lambda: ("lost", P) in pair.table.events)
    assert only_these(pair.target, TARGET, TOKENS)
    arrived, sent = (rows(kv, blocks, 0, TOKENS) for kv, blocks in ((pair.target, TARGET), (pair.source, SOURCE)))
    assert bool(((arrived == sent) | (arrived == 0)).all())
    agents.dead = agents.frozen = False
    agents.before = lambda segment: None
    pair.reports.done(pair.push("next", TOKENS, SOURCE, NEXT))
    assert same_kv(pair.source, SOURCE, pair.target, NEXT, TOKENS)
    assert list(pair.table.commits) == [HandoffId("next", 1)]
    pair.sender.close()
    assert held_by(staging) == 0
    eventually(lambda: agents.handles == 0)


def test_a_peer_that_reads_pools_is_refused(connected) -> None:
    """The release before this one had no `reach`."""
    pair = connected()
    (transport,) = pair.sender._end.choice.transports
    transport.reach = ""
    pair.reports.failed(pair.push("r", TOKENS, SOURCE, TARGET), VersionRefused)
