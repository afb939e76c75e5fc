"""The heads that each rank holds and supplies, for all sizes: counted by (layer, head)."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.tp.sharding import Heads
from baton.errors import ConfigError

SIZES = (1, 2, 4, 8)
LATENT = 1  # latent attention caches one head


def held_by_definition(kv_heads: int, size: int, rank: int) -> list[int]:
    """Return contiguous shares, or the one head at this rank's place among the ranks."""
    if kv_heads >= size:
        return [head for head in range(kv_heads) if head * size // kv_heads == rank]
    return [rank * kv_heads // size]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kv_heads", [LATENT, 2, 4, 8, 16])
def test_what_each_rank_holds(kv_heads: int, size: int) -> None:
    heads = Heads(kv_heads, size)
    held = [list(heads.held(rank)) for rank in range(size)]
    assert held == [held_by_definition(kv_heads, size, rank) for rank in range(size)]
    assert {len(each) for each in held} == {heads.per_rank}
    assert Counter(itertools.chain(*held)) == dict.fromkeys(range(kv_heads), heads.replicas)


@given(layers=st.integers(1, 60), kv_heads=st.sampled_from([LATENT, 2, 4]), size=st.sampled_from(SIZES))
def test_replicas_share_the_layers_of_their_head(layers: int, kv_heads: int, size: int) -> None:
    heads = Heads(kv_heads, size)
    shares = [heads.supplied(rank, layers) for rank in range(size)]
    for first in range(0, size, heads.replicas):
        group = shares[first : first + heads.replicas]
        assert sorted(itertools.chain(*group)) == list(range(layers))
        assert max(map(len, group)) - min(map(len, group)) <= 1


@pytest.mark.parametrize(
    ("kv_heads", "size", "why"),
    [
        (6, 4, "6 KV heads cannot be divided among 4 ranks: neither number divides the other"),
        (4, 6, "4 KV heads cannot be divided among 6 ranks: neither number divides the other"),
        (3, 2, "3 KV heads cannot be divided among 2 ranks"),
        (0, 1, "0 KV heads on 1 ranks: both must be at least 1"),
        (2, 0, "2 KV heads on 0 ranks: both must be at least 1"),
        (-4, 2, "-4 KV heads on "),
    ],
)
def test_what_no_ranks_can_hold_is_refused_with_both_numbers(kv_heads: int, size: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Heads(kv_heads, size)
