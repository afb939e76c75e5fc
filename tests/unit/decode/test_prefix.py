"""Cached prefixes on a decode worker are not sent again: they are shared and pinned, never written, and freed."""

import pytest
import torch

from baton.errors import OfferRefused
from kvtransfer.handoff import PushJob
from tests.support.sessions import BLOCK, H, P, expected, names_of, release, reserve, spec_of
from tests.support.workers import Pair

SPEC = spec_of()  # 9 tokens: two full blocks, and the last position
NAMES = names_of(SPEC.tokens)


@pytest.fixture
def pair():
    return Pair().warm()


@pytest.mark.parametrize(
    ("known", "names", "cached"), [(9, 2, 8), (9, 1, 4), (9, 0, 0), (8, 2, 4), (4, 1, 0), (5, 2, 4), (10, 2, 8)]
)
def test_a_reservation_says_how_much_is_here_but_the_last_position_always_comes(pair, router, known, names, cached):
    pair.decode.take(router, reserve(known=known, prefix=NAMES[:names]))
    assert router.cached_at(H) == cached
    counts = pair.decode.counts
    assert (counts.owned, counts.reserved) == (cached // BLOCK, -(-(known + 1) // BLOCK) - cached // BLOCK)
    pair.decode.take(router, release())
    assert pair.decode.all_free


@pytest.mark.parametrize("size", [2, BLOCK, 8])
def test_only_the_rest_comes_and_the_tokens_are_the_same(router, size):
    """The two sides have different block sizes."""
    pair = Pair(decode_block_size=size).warm()
    before = {block: pair.decode.engine.kv.k[:, block].view(torch.int32).clone() for block in pair.cached()}
    pair.hand_over(router, H, SPEC)
    [push] = pair.prefill.pusher.pushes.values()
    assert push.job.skip == 8
    assert {begin for _, begin, _ in push.frames} == {8}
    pair.decode.run()
    assert router.ids()[1:] == expected(SPEC)
    assert list(before) == pair.cached()
    for block, kept in before.items():
        assert torch.equal(pair.decode.engine.kv.k[:, block].view(torch.int32), kept), "it was written"
    pair.ends_free()


@pytest.fixture
def sender(pair):
    """The decode worker's own sender, towards its prefill workers."""
    return pair.decode.attach_pusher()


@pytest.mark.parametrize("end", ["pushed", "released before"])
def test_what_is_fetched_is_pinned_until_it_was_sent(pair, router, sender, end):
    pair.hand_over(router, H, SPEC, upto="offered")
    for _ in range(2):  # requested twice, sent once
        pair.decode.role.reservations.fetch(H, P, 4, 8)
    pair.decode.loop.drain()
    [push] = sender.pushes.values()
    assert (push.job, push.told, push.end.spec) == (PushJob(H, P, 8, 4), [(2, 8)], None)
    assert list(push.blocks) == pair.cached()
    if end == "released before":
        pair.decode.take(router, release())
    assert pair.decode.counts.owned == 2
    pair.decode.push_ends(H, OfferRefused("whatever"))
    pair.decode.take(router, release())
    pair.ends_free()


@pytest.mark.parametrize("why", ["over", "refused", "in doubt since it was reserved"])
def test_what_is_not_sent_is_not_pinned(pair, router, sender, why):
    pair.hand_over(router, H, SPEC, upto="offered")
    if why == "in doubt since it was reserved":
        doubted = pair.decode.engine.pool.allocate(0, shared=pair.cached())
        doubted.withdraw()  # as when a step that reads them fails
        doubted.release()
    pair.decode.role.reservations.fetch(H, P, 0, 8)
    if why == "over":
        pair.decode.take(router, release())
    elif why == "refused":
        sender.refuse = OfferRefused("the sender was closed")
    pair.decode.loop.drain()
    assert sender.pushes == {}
    pair.decode.take(router, release())
    pair.ends_free()
