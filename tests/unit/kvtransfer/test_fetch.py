"""A sender that lacks KV which the receiver has asks for it; the answer is a handoff without a sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtransfer.handoff import PushEnd
from tests.support.time_factor import scaled
from tests.unit.kvtransfer.support import P, only_these, same_kv


@pytest.mark.parametrize("verify", [False, True])
def test_a_fetch_follows_the_offer(pair, verify: bool) -> None:
    pair.table.cached = 12
    job = replace(pair.reserve("r", 16, range(4), skip=12), fetch=(4, 12), verify=verify)
    pair.sender.begin(job)
    pair.table.wait_for(("fetch", job.handoff))
    assert pair.table.fetches == [(job.handoff, P, 4, 12)]
    assert pair.table.verified == [job.handoff] * verify
    assert [kind for kind, _ in pair.table.events] == ["offer", "fetch"]
    pair.complete(job, range(10, 14))
    assert pair.unfetched.empty()


def test_a_fetch_that_is_refused_is_told_and_the_push_goes_on(pair) -> None:
    pair.table.cached = 8
    job = replace(pair.reserve("r", 16, range(4), skip=12), fetch=(4, 12))
    pair.sender.begin(job)
    assert pair.unfetched.get(timeout=scaled(5)) == job.handoff
    pair.complete(job, range(10, 14))
    assert pair.table.fetches == []
    assert [kind for kind, _ in pair.table.events] == ["offer", "commit"]


def test_the_answer_to_a_fetch_is_committed_without_a_sequence(pair) -> None:
    job = pair.reserve("r", 12, range(3), skip=4)
    pair.sender.begin(job)
    pair.complete(job, range(10, 13), PushEnd())
    commit = pair.table.commits[job.handoff]
    assert (commit.spec, list(commit.first)) == (None, [])
    assert same_kv(pair.source, range(10, 13), pair.target, range(3), 12, 4)
    assert only_these(pair.target, range(3), 12, 4)
