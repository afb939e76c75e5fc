"""SIGTERM: a worker takes nothing new, and what it has goes on elsewhere, in whatever state it is."""

import pytest

from tests.support.sessions import DRAINING, expected, prefill, release, reserve


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
    assert router.refusals == [DRAINING]
    pair.end_pushes()
    ends_free(pair.decode)
    assert "committed" not in router.kinds()


@pytest.mark.parametrize("how", ["handed over", "while it drains", "alone"])
def test_what_decodes_is_handed_back_and_nothing_said_is_lost(pair, router, how):
    if how == "alone":
        pair.decode.take(router, reserve(), prefill(to=None))
    else:
        pair.adopt(router)
        pair.decode.step()
    if how == "while it drains":
        pair.decode.role.drain()
    pair.decode.role.leave()
    assert router.kinds()[-1] == "preempted"
    assert router.ids() == expected(tokens=0 if how == "alone" else 2)
    assert [span.name for span in router.events[-1].spans] == ["decode"]
    ends_free(pair.decode)


def test_a_commit_that_was_accepted_is_told_and_then_handed_back(pair, router):
    pair.hand_over(router)
    pair.decode.role.leave()
    assert "refused" not in router.kinds()
    pair.decode.loop.drain()
    assert router.kinds()[-3:] == ["committed", "tokens", "preempted"]
    ends_free(pair.decode)


def test_what_is_parked_is_let_go(pair, router):
    pair.decode.take(router, reserve(resumable_s=30.0), prefill(to=None))
    pair.decode.step()
    pair.decode.role.gone(router)
    pair.decode.role.leave()
    assert len(pair.decode.role.parking) == 0
    ends_free(pair.decode)


def test_a_prompt_that_is_not_computed_yet_is_given_back(pair, router):
    pair.begin(router)
    pair.prefill.role.leave()
    assert router.refusals == [DRAINING]
    pair.decode.take(router, release())
    ends_free(pair.decode)
    pair.end_pushes()
    ends_free(pair.prefill)


def test_what_is_computed_is_handed_over(pair, router):
    pair.begin(router)
    pair.prefill.run()
    pair.prefill.role.leave()
    assert router.kinds()[-1] == "tokens"
    pair.advance()
    pair.prefill.run()
    pair.decode.run()
    assert "pushed" in router.kinds()
    assert router.kinds()[-1] == "finish"
    ends_free(pair.prefill)
