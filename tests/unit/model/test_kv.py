"""The KV cache and its wire order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.core import KVLayout
from baton.engine.kv import KVCache

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=4, block_size=5, dtype="bfloat16")


def numbered(total_blocks: int = 7) -> KVCache:
    kv = KVCache(LAYOUT, total_blocks)
    kv.k.copy_(torch.randn(kv.k.shape, generator=torch.Generator().manual_seed(1)))
    kv.v.copy_(torch.randn(kv.v.shape, generator=torch.Generator().manual_seed(2)))
    return kv


def test_shape_and_size():
    kv = KVCache(LAYOUT, 7)
    assert kv.k.shape == kv.v.shape == (3, 7, 5, 2, 4)
    assert kv.k.dtype == torch.bfloat16
    assert kv.nbytes(range(3), range(7)) == 7 * LAYOUT.block_bytes == 2 * kv.k.numel() * 2


def test_wire_order_is_k_then_v_of_each_layer():
    kv, layers, blocks = numbered(), range(1, 3), [4, 0, 6]
    out = torch.empty(kv.nbytes(layers, blocks), dtype=torch.uint8)
    kv.gather(layers, blocks, out)
    expected = torch.cat([cache[layer, blocks].reshape(-1) for layer in layers for cache in (kv.k, kv.v)])
    assert torch.equal(out.view(torch.bfloat16), expected)


def test_scatter_puts_back_what_gather_took_and_nothing_else():
    source, target = numbered(), KVCache(LAYOUT, 9)
    data = torch.empty(source.nbytes(range(1, 2), [5, 2]), dtype=torch.uint8)
    source.gather(range(1, 2), [5, 2], data)
    target.scatter(range(1, 2), [8, 3], data)
    for there, here in ((target.k, source.k), (target.v, source.v)):
        assert torch.equal(there[1, [8, 3]], here[1, [5, 2]])
        there[1, [8, 3]] = 0
        assert not there.any()


def test_empty_rectangle():
    kv = numbered()
    kv.gather(range(3), [], torch.empty(0, dtype=torch.uint8))
    kv.scatter(range(0), [1], torch.empty(0, dtype=torch.uint8))


@pytest.mark.parametrize("data", [torch.empty(79, dtype=torch.uint8), torch.empty(160), torch.empty(0)])
def test_wrong_buffer(data: torch.Tensor):
    with pytest.raises(ValueError, match="need uint8"):
        numbered().gather(range(1), [0], data)


@pytest.mark.parametrize(("layers", "blocks"), [(range(2, 4), [0]), (range(1), [7]), (range(1), [-1, 3])])
def test_out_of_range(layers: range, blocks: list[int]):
    kv = numbered()
    data = torch.zeros(kv.nbytes(layers, blocks), dtype=torch.uint8)
    before = kv.k.clone()
    for call in (kv.gather, kv.scatter):
        with pytest.raises(IndexError, match="out of range"):
            call(layers, blocks, data)
    assert torch.equal(kv.k, before)


def test_a_layout_of_one_tensor():
    """What latent attention caches: half the bytes, and the same operations."""
    layout = replace(LAYOUT, tensors=("latent",))
    source, target = KVCache(layout, 7), KVCache(layout, 9)
    source.k.copy_(torch.randn(source.k.shape, generator=torch.Generator().manual_seed(1)))
    assert source.v.numel() == 0
    assert 2 * layout.block_bytes == LAYOUT.block_bytes
    assert source.nbytes(range(3), range(7)) == source.k.nbytes
    data = torch.empty(source.nbytes(range(1, 3), [5, 2]), dtype=torch.uint8)
    source.gather(range(1, 3), [5, 2], data)
    assert torch.equal(data.view(torch.bfloat16), source.k[1:3, [5, 2]].flatten())
    target.scatter(range(1, 3), [8, 3], data)
    assert torch.equal(target.k[1:3, [8, 3]], source.k[1:3, [5, 2]])
    target.k[1:3, [8, 3]] = 0
    assert not target.k.any()
