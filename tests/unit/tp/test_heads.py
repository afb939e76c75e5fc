"""The heads that each rank holds, supplies and receives, for all pairs of sizes: counted by (layer, head)."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.tp.sharding import Heads, Rectangle, rectangles
from baton.errors import ConfigError

SIZES = (1, 2, 4, 8)
sizes = st.sampled_from(SIZES)
LATENT = 1  # latent attention caches one head


def fits(kv_heads: int, size: int) -> bool:
    return kv_heads % size == 0 or size % kv_heads == 0


def cells(rectangle: Rectangle) -> set[tuple[int, int]]:
    return set(itertools.product(rectangle.layers, rectangle.heads))


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


@settings(max_examples=200)
@given(sizes, sizes, st.integers(1, 40), st.sampled_from([LATENT, 2, 4, 8, 16, 24]))
def test_each_head_of_each_layer_arrives_once_at_all_that_hold_it(sender, receiver, layers, kv_heads) -> None:
    moves = rectangles(layers, kv_heads, sender, receiver)
    arrived = Counter((move.receiver_rank, cell) for move in moves for cell in cells(move))
    held = {rank: held_by_definition(kv_heads, receiver, rank) for rank in range(receiver)}
    due = {(rank, cell) for rank in held for cell in itertools.product(range(layers), held[rank])}
    assert arrived == dict.fromkeys(due, 1)
    for move in moves:
        assert set(move.heads) <= set(held_by_definition(kv_heads, sender, move.sender_rank))
        assert move.sender_rank in range(sender)


@settings(max_examples=200)
@given(sizes, sizes, st.integers(1, 40), st.sampled_from([LATENT, 2, 4, 8]))
def test_a_head_of_a_layer_is_read_once_whoever_takes_it(sender, receiver, layers, kv_heads) -> None:
    """The wire has each head once, so a transfer is the composition of the sender's reads and the receiver's writes."""
    reads, writes = rectangles(layers, kv_heads, sender, 1), rectangles(layers, kv_heads, 1, receiver)
    read = Counter(cell for move in reads for cell in cells(move))
    assert read == dict.fromkeys(itertools.product(range(layers), range(kv_heads)), 1)
    composed = {(a.sender_rank, b.receiver_rank): cells(a) & cells(b) for a, b in itertools.product(reads, writes)}
    moves = rectangles(layers, kv_heads, sender, receiver)
    direct = {(move.sender_rank, move.receiver_rank): cells(move) for move in moves}
    assert direct == {pair: both for pair, both in composed.items() if both}


@given(
    layers=st.integers(1, 40),
    kv_heads=st.sampled_from([LATENT, 2, 3, 4, 6, 8]),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)),
)
def test_no_two_could_be_one(layers: int, kv_heads: int, sizes: tuple[int, int]) -> None:
    if not all(fits(kv_heads, size) for size in sizes):
        return
    moves = rectangles(layers, kv_heads, *sizes)
    assert all(move.layers and move.heads for move in moves)
    for a, b in itertools.combinations(moves, 2):
        if (a.sender_rank, a.receiver_rank) == (b.sender_rank, b.receiver_rank):
            together = cells(a) | cells(b)
            box = set(itertools.product({layer for layer, _ in together}, {head for _, head in together}))
            assert together != box, (a, b)


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
        (6, 4, "6 KV heads cannot be held by 4 ranks: neither number divides the other"),
        (4, 6, "4 KV heads cannot be held by 6 ranks: neither number divides the other"),
        (3, 2, "3 KV heads cannot be held by 2 ranks"),
        (0, 1, "0 KV heads on 1 ranks: both must be at least 1"),
        (2, 0, "2 KV heads on 0 ranks: both must be at least 1"),
        (-4, 2, "-4 KV heads on "),
    ],
)
def test_what_no_ranks_can_hold_is_refused_with_both_numbers(kv_heads: int, size: int, why: str) -> None:
    for call, *arguments in (
        (Heads, kv_heads, size),
        (rectangles, 2, kv_heads, 1, size),
        (rectangles, 2, kv_heads, size, 1),
    ):
        with pytest.raises(ConfigError, match=why):
            call(*arguments)
