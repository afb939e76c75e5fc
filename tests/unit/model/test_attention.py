"""Paged attention against plain attention, at the edges of tiles, groups, windows and blocks."""

import random

import pytest
import torch

from baton.engine.kernels import torch_attention as attention
from tests.support.paged_attention import paged

HEADS, KV_HEADS, DIM, BLOCK = 6, 3, 8, 4


@pytest.mark.parametrize("window", [None, 1, 5, 16, 1000])
@pytest.mark.parametrize(("tile_rows", "group_slots"), [(256, 65536), (3, 40), (1, 1)])
def test_any_mix(window: int | None, tile_rows: int, group_slots: int, monkeypatch, seed: int):
    monkeypatch.setattr(attention, "TILE_ROWS", tile_rows)
    monkeypatch.setattr(attention, "GROUP_SLOTS", group_slots)
    rng = random.Random(seed)
    contexts = [1, 2, 4, 5, 16, 17, *(rng.randint(1, 150) for _ in range(4))]
    lengths = [(rng.choice([1, context, rng.randint(1, context)]), context) for context in contexts]
    case = paged(seed, lengths, heads=HEADS, kv_heads=KV_HEADS, dim=DIM, block=BLOCK)
    out = torch.empty(len(case.query), HEADS * DIM)
    attention.PagedAttention(case.batch, BLOCK, window, DIM**-0.5)(case.query, case.keys, case.values, out)
    torch.testing.assert_close(out, case.expected(window).float(), atol=2e-5, rtol=1e-4)


def test_groups_waste_at_most_half_and_stay_within_their_bound():
    rng = random.Random(3)
    singles = [(i, i, rng.randint(1, 9000)) for i in range(200)]
    groups = list(attention._similar(singles, None))
    assert sorted(member for group in groups for member in group) == singles
    for group in groups:
        lengths = [context for _, _, context in group]
        assert max(lengths) <= 2 * min(lengths) + 64
        assert len(lengths) * max(lengths) <= attention.GROUP_SLOTS
