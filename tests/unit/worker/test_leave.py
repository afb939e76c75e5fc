"""SIGTERM: a worker takes nothing new, and what it has goes on elsewhere, in whatever state it is."""

import pytest

from baton.rpc.v1 import worker_pb2 as pb
from tests.unit.worker.support import BACKEND, FakeSession, H, Pair, prefill, release, reserve, spec_of

DRAINING = pb.REFUSAL_REASON_DRAINING


@pytest.fixture
def pair():
    return Pair()


@pytest.fixture
def router():
    return FakeSession()


def ends_free(side):
    side.run()
    assert side.all_free
    assert not list(side.role.holdings())


@pytest.mark.parametrize("upto", ["reserved", "offered", "written"])
def test_what_is_reserved_is_given_back(pair, router, upto):
    if upto == "reserved":
        pair.decode.take(router, reserve())
    else:
        pair.hand_over(router, upto=upto)
    pair.decode.role.leave()
    assert [e.refused.reason for e in router.events if e.HasField("refused")] == [DRAINING]
    pair.end_pushes()
    ends_free(pair.decode)
    assert "committed" not in router.kinds()


def test_what_decodes_is_handed_back_and_nothing_said_is_lost(pair):
    from_d = FakeSession("router-d")
    pair.hand_over(from_d)
    pair.decode.loop.drain()
    pair.decode.step()
    pair.decode.role.leave()
    assert from_d.kinds()[-1] == "preempted"
    told = [i for e in from_d.events if e.HasField("tokens") for i in e.tokens.ids]
    assert told[-2:] == BACKEND.expected(spec_of())[:2]
    ends_free(pair.decode)


def test_a_commit_that_was_accepted_is_told_and_then_handed_back(pair, router):
    pair.hand_over(router)
    pair.decode.role.leave()
    assert "refused" not in router.kinds()
    pair.decode.loop.drain()
    assert router.kinds()[-3:] == ["committed", "tokens", "preempted"]
    ends_free(pair.decode)


def test_a_prompt_that_is_computed_there_is_handed_back(pair, router):
    pair.decode.take(router, reserve())
    pair.decode.take(router, prefill(to=None))
    pair.decode.role.leave()
    assert router.kinds()[-1] == "preempted"
    ends_free(pair.decode)


def test_nothing_new_is_taken(pair, router):
    pair.decode.role.leave()
    pair.prefill.role.leave()
    pair.decode.take(router, reserve())
    pair.prefill.take(router, prefill())
    assert [e.refused.reason for e in router.events] == [DRAINING, DRAINING]
    ends_free(pair.decode)
    ends_free(pair.prefill)


def test_what_is_parked_is_let_go(pair, router):
    command = reserve()
    command.reserve.resumable_s = 30.0
    pair.decode.take(router, command)
    pair.decode.take(router, prefill(to=None))
    pair.decode.step()
    pair.decode.role.gone(router)
    pair.decode.role.leave()
    assert len(pair.decode.role.parking) == 0
    ends_free(pair.decode)


def test_a_prompt_that_is_not_computed_yet_is_given_back(pair, router):
    pair.begin(router)
    pair.prefill.role.leave()
    assert [e.refused.reason for e in router.events if e.HasField("refused")] == [DRAINING]
    pair.decode.take(router, release())
    ends_free(pair.decode)
    pair.end_pushes()
    ends_free(pair.prefill)


def test_what_is_computed_is_handed_over(pair, router):
    pair.begin(router)
    pair.prefill.run()
    pair.prefill.role.leave()
    assert router.kinds()[-1] == "tokens"
    pusher = pair.prefill.pusher
    while H in pusher.pushes:
        pusher.advance(H, pair.decode)
    pair.prefill.run()
    pair.decode.run()
    assert "pushed" in router.kinds()
    assert router.kinds()[-1] == "finish"
    ends_free(pair.prefill)
