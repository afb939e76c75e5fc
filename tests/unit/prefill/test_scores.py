"""Prompts that are scored, and prompts without an answer: what a worker reports, repeats and pushes."""

from dataclasses import replace

import pytest

from baton.core import FinishReason
from baton.engine.sampling import prompt_logprobs
from baton.rpc import convert
from tests.support.sessions import FakeSession, H, attach, next_of, prefill, repush, reserve, spec_of
from tests.support.workers import DecodeSide, Pair

SCORED = replace(spec_of(), prompt_logprobs=1)
EMPTY = replace(SCORED, sampling=replace(SCORED.sampling, max_tokens=0))


def parts(session, handoff=H):
    found = [e.prompt_logprobs for e in session.told(handoff) if e.HasField("prompt_logprobs")]
    return [convert.prompt_part_from_pb(part) for part in found]


def positions(session, handoff=H):
    return [(part.start, len(part.tokens)) for part in parts(session, handoff)]


@pytest.fixture(autouse=True)
def three_rows(monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "ROWS", 3)


def test_they_leave_part_by_part_before_the_first_token(side, router):
    side.serve(router, prefill(spec=SCORED))
    assert router.kinds() == ["prompt_logprobs"] * 3 + ["tokens"]
    assert positions(router) == [(1, 3), (4, 3), (7, 2)]
    assert [t.token_id for part in parts(router) for t in part.tokens] == list(SCORED.prompt[1:])


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_a_repush_repeats_them_under_the_new_handoff(side, router, steps):
    side.take(router, prefill(spec=SCORED))
    side.step(steps)
    before = positions(router)
    side.take(router, repush())
    side.run()
    assert positions(router) == before
    assert positions(router, next_of(H)) == [(1, 3), (4, 3), (7, 2)]
    assert side.engine.counters.prefill_tokens == 9


def test_a_prompt_without_an_answer_is_neither_offered_nor_kept(side, router):
    side.serve(router, prefill(spec=EMPTY))
    assert router.kinds() == ["prompt_logprobs"] * 3 + ["finish"]
    assert convert.finish_from_pb(router.events[-1].finish).reason is FinishReason.LENGTH
    assert (side.pusher.pushes, side.all_free, router.handoffs) == ({}, True, set())


def test_a_commit_and_a_takeover_ignore_them(router):
    pair = Pair()
    pair.hand_over(router, spec=SCORED, resumable_s=9, stream="s")
    pair.decode.loop.drain()
    pair.decode.run()
    other = FakeSession("router-b")
    pair.decode.role.gone(router)
    pair.decode.take(other, attach(2))
    assert other.kinds()[0] == "attached"


@pytest.mark.parametrize("spec", [SCORED, EMPTY])
def test_a_decode_worker_that_works_alone_sends_them_too(router, spec):
    side = DecodeSide()
    side.serve(router, reserve(resumable_s=9, stream="s"), prefill(spec=spec, to=None))
    assert router.kinds()[:4] == ["reserved"] + ["prompt_logprobs"] * 3
    assert positions(router) == [(1, 3), (4, 3), (7, 2)]
    assert router.kinds()[-1] == "finish"
    assert side.all_free
