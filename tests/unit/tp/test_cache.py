"""KV out of the ranks of one worker and into those of another: every rank has exactly its heads, and nothing more."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from baton.core import KVLayout
from baton.engine.kv import KVCache
from baton.engine.tp.cache import ShardedCache, rank_layout
from baton.errors import ConfigError
from tests.unit.tp.support import GQA, LATENT, LAYOUTS, poisoned, put, same, whole, wire_of

PAIRS = list(itertools.product((1, 2, 4, 8), (1, 2, 4, 8)))
TOKENS, TOTAL = 23, 20


def some_blocks(rng: random.Random, layout: KVLayout) -> list[int]:
    return rng.sample(range(TOTAL), layout.blocks_for(TOKENS))


def gathered(cache: ShardedCache, layers: range, blocks: list[int], begin: int, end: int) -> torch.Tensor:
    out = torch.full((len(layers) * (end - begin) * cache.layout.layer_token_bytes,), 0xAA, dtype=torch.uint8)
    cache.gather(layers, blocks, begin, end, out)
    return out


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.kv_heads}-{layout.dtype}-{layout.tensors[0]}")
@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
def test_frames_between_workers_of_any_sizes(sender: int, receiver: int, layout: KVLayout, seed: int) -> None:
    """A whole prompt but what is skipped, in frames of any layers and positions, between blocks of different sizes."""
    rng, kv = random.Random(seed), whole(layout, TOKENS, seed)
    source = poisoned(replace(layout, block_size=rng.randint(2, 7)), sender, TOTAL)
    target = poisoned(replace(layout, block_size=rng.randint(2, 7)), receiver, TOTAL)
    there, here = some_blocks(rng, source.layout), some_blocks(rng, target.layout)
    put(source, there, kv)
    skip, cut, row = rng.randint(0, 4), rng.randint(5, TOKENS - 1), rng.randint(1, layout.layers - 1)
    before = [[tensor.clone() for tensor in cache.tensors] for cache in source.ranks]
    for layers, (begin, end) in itertools.product(
        (range(row, layout.layers), range(row)), ((cut, TOKENS), (skip, cut))
    ):
        wire = gathered(source, layers, there, begin, end)
        assert torch.equal(wire, wire_of(kv, layers, begin, end))
        target.scatter(layers, here, begin, end, wire)
    expected = poisoned(target.layout, receiver, TOTAL)
    put(expected, here, kv)
    for tensor in (tensor for cache in expected.ranks for tensor in cache.tensors):
        size = target.layout.block_size
        for position in range(skip):
            tensor[:, here[position // size], position % size] = float("nan")
    assert same(target, expected)
    kept = (zip(cache.tensors, copies, strict=True) for cache, copies in zip(source.ranks, before, strict=True))
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in itertools.chain(*kept))


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("layout", [replace(GQA, kv_heads=2), LATENT], ids=["gqa", "latent"])
def test_replicas_that_do_not_supply_are_not_read(size: int, layout: KVLayout) -> None:
    """Each layer of a head has one supplier: what another replica has does not come through."""
    kv, cache = whole(layout, 4, 1), poisoned(layout, size, 1)
    put(cache, [0], kv)
    heads = cache.layout.kv_heads
    for layer in range(layout.layers):
        changed = 0
        for own in cache.ranks:
            kept = own.k[layer].clone()
            own.k[layer] += 1.0
            seen = gathered(cache, range(layer, layer + 1), [0], 0, 4).view(torch.float32)
            wrong = (seen != wire_of(kv, range(layer, layer + 1), 0, 4).view(torch.float32)).sum()
            changed += int(wrong) > 0
            own.k[layer] = kept
        assert changed == min(size, heads), layer


def test_one_frame_has_one_temporary_for_each_rank(monkeypatch) -> None:
    """And nothing goes token by token: a rank's cache is asked once."""
    cache, asked = poisoned(GQA, 4, TOTAL), list[tuple[str, int]]()

    def noted(own: KVCache, rank: int, name: str) -> None:
        call = getattr(own, name)

        def noting(*arguments) -> None:
            asked.append((name, rank))
            call(*arguments)

        monkeypatch.setattr(own, name, noting)

    for rank, own in enumerate(cache.ranks):
        for name in ("gather", "scatter"):
            noted(own, rank, name)
    wire = gathered(cache, range(5), [3, 1, 2], 0, 12)
    cache.scatter(range(5), [3, 1, 2], 0, 12, wire)
    assert asked == [(name, rank) for name in ("gather", "scatter") for rank in range(4)]


def test_it_looks_like_the_cache_of_the_whole_model() -> None:
    cache, plain = poisoned(GQA, 4, 7), KVCache(GQA, 7)
    assert isinstance(cache, KVCache)
    assert (cache.layout, cache.total_blocks, cache.device) == (plain.layout, plain.total_blocks, plain.device)
    assert (cache.k.shape, cache.k.dtype, cache.v.shape) == (plain.k.shape, plain.k.dtype, plain.v.shape)
    assert cache.k.device.type == "meta"  # no bytes
    assert poisoned(LATENT, 2, 7).v.shape == KVCache(LATENT, 7).v.shape
    assert cache.mark() is None
    cache.settle()


@pytest.mark.parametrize("data", [torch.empty(159, dtype=torch.uint8), torch.empty(160), torch.empty(0)])
def test_wrong_buffer(data: torch.Tensor) -> None:
    for call in (poisoned(GQA, 2, 3).gather, poisoned(GQA, 2, 3).scatter):
        with pytest.raises(ValueError, match="need uint8"):
            call(range(1), [0], 0, 4, data)


@pytest.mark.parametrize(
    ("layers", "blocks", "begin", "end"),
    [
        (range(4, 6), [0], 0, 4),
        (range(-1, 1), [0], 0, 4),
        (range(1), [7], 0, 4),
        (range(1), [-1, 3], 3, 5),
        (range(1), [0, 1], 5, 9),
        (range(1), [0, 1], -1, 3),
    ],
)
def test_out_of_range_touches_nothing(layers: range, blocks: list[int], begin: int, end: int) -> None:
    cache = poisoned(GQA, 4, 7)
    data = torch.zeros(len(layers) * (end - begin) * GQA.layer_token_bytes, dtype=torch.uint8)
    for call in (cache.gather, cache.scatter):
        with pytest.raises(IndexError, match="out of range"):
            call(layers, blocks, begin, end, data)
    assert same(cache, poisoned(GQA, 4, 7))


def test_no_layers_are_nothing() -> None:
    cache = poisoned(GQA, 4, 7)
    assert gathered(cache, range(2, 2), [1], 0, 4).numel() == 0
    cache.scatter(range(0), [1], 0, 4, torch.empty(0, dtype=torch.uint8))
    assert same(cache, poisoned(GQA, 4, 7))


def test_ranks_that_do_not_fit_are_refused() -> None:
    own = rank_layout(GQA, 2)
    with pytest.raises(ValueError, match=r"caches of ranks \[1\] are not 3 blocks"):
        ShardedCache(GQA, [KVCache(own, 3), KVCache(own, 4)])
    with pytest.raises(ValueError, match=r"ranks \[0, 1\]"):
        ShardedCache(GQA, [KVCache(GQA, 3), KVCache(GQA, 3)])
    with pytest.raises(ConfigError, match="8 KV heads cannot be held by 3 ranks"):
        ShardedCache(GQA, [KVCache(own, 3)] * 3)


def test_on_gpus_mark_and_settle_are_for_all_of_them(monkeypatch) -> None:
    """Not run on GPUs: the calls of torch are looked at."""
    log, own = list[tuple[str, ...]](), rank_layout(GQA, 4)

    def stream(device) -> SimpleNamespace:
        return SimpleNamespace(
            device=str(device),
            synchronize=lambda: log.append(("synchronize", str(device))),
            wait_event=lambda event: log.append(("wait", str(device), event.at)),
        )

    class Event:
        def record(self, recorded: SimpleNamespace) -> None:
            self.at = recorded.device
            log.append(("record", self.at))

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    storage = KVCache(own, 2).tensors
    cache = ShardedCache(GQA, [KVCache(own, 2, f"cuda:{index}", storage=storage) for index in (2, 3, 4, 4)])
    assert cache.device == torch.device("cuda", 2)
    mark = cache.mark()
    assert mark is not None
    assert log == [("record", "cuda:2")]
    mark.wait()
    assert log[1:] == [("wait", f"cuda:{index}", "cuda:2") for index in (2, 3, 4)]
    del log[:]
    cache.settle()
    assert set(log) == {("synchronize", f"cuda:{index}") for index in (2, 3, 4)}
