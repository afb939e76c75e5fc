"""The torch reference: products in the caller's memory, and paged attention at the edges of tiles and groups."""

import random
from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional as F

from baton.engine.kernels import torch_attention as attention
from baton.engine.kernels.torch_reference import TorchLinear
from tests.support.paged_attention import paged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_only_a_result_of_another_dtype_is_copied(dtype, with_bias, seed, monkeypatch):
    """torch.mm writes to `out`, but only in the dtype of its factors."""
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((3, 8), (5, 8), (5,)))
    copied = Mock(wraps=F.linear)
    monkeypatch.setattr(F, "linear", copied)
    layer = TorchLinear(weight, bias if with_bias else None)
    expected = x.float() @ weight.float().T + (bias.float() if with_bias else 0)
    for out in (torch.empty(3, 5, dtype=dtype), torch.empty(3, 5, dtype=torch.float64)):
        copied.reset_mock()
        assert layer(x, out) is out
        assert copied.called == (out.dtype is torch.float64)
        torch.testing.assert_close(out.float(), expected, atol=3e-2, rtol=3e-2)


HEADS, KV_HEADS, DIM, BLOCK = 6, 3, 8, 4


@pytest.mark.parametrize("window", [None, 1, 5, 16, 1000])
@pytest.mark.parametrize(("tile_rows", "group_slots"), [(256, 65536), (3, 40), (1, 1)])
def test_paged_attention_equals_plain_attention(
    window: int | None, tile_rows: int, group_slots: int, monkeypatch, seed: int
):
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
