"""KV from the ranks of one worker to those of another: every rank gets exactly its heads."""

import itertools
import random
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from baton.core import KVLayout
from baton.engine.kv_cache import KVCache
from baton.engine.tp.kv_memory import ShardedCache, rank_layout
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
    """A prompt without its skipped part, in frames of any layers and positions, between blocks of different sizes."""
    rng, kv = random.Random(seed), whole(layout, TOKENS, seed)
    source = poisoned(replace(layout, block_size=rng.randint(2, 7)), sender, TOTAL)
    target = poisoned(replace(layout, block_size=rng.randint(2, 7)), receiver, TOTAL)
    there, here = some_blocks(rng, source.layout), some_blocks(rng, target.layout)
    put(source, there, kv)
    skip, cut, row = rng.randint(0, 4), rng.randint(5, TOKENS - 1), rng.randint(1, layout.layers - 1)
    before = poisoned(source.layout, sender, TOTAL)
    put(before, there, kv)
    for layers, (begin, end) in itertools.product(
        (range(row, layout.layers), range(row)), ((cut, TOKENS), (skip, cut))
    ):
        wire = gathered(source, layers, there, begin, end)
        assert torch.equal(wire, wire_of(kv, layers, begin, end))
        target.scatter(layers, here, begin, end, wire)
    expected = poisoned(target.layout, receiver, TOTAL)
    kv[:, :, :skip] = float("nan")  # nothing is written there
    put(expected, here, kv)
    assert same(target, expected)
    assert same(source, before)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("layout", [replace(GQA, kv_heads=2), LATENT], ids=["gqa", "latent"])
def test_replicas_that_do_not_supply_are_not_read(size: int, layout: KVLayout) -> None:
    """Only one replica supplies each layer of a head. Other replicas' bytes are not sent."""
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
    """No copy is made per token: each rank's cache is called once."""
    cache = poisoned(GQA, 4, TOTAL)
    calls = [(own, name, Mock(wraps=getattr(own, name))) for own in cache.ranks for name in ("gather", "scatter")]
    for call in calls:
        monkeypatch.setattr(*call)
    wire = gathered(cache, range(5), [3, 1, 2], 0, 12)
    cache.scatter(range(5), [3, 1, 2], 0, 12, wire)
    assert [noted.call_count for _, _, noted in calls] == [1] * 8


def test_it_looks_like_the_cache_of_the_whole_model() -> None:
    cache, plain = poisoned(GQA, 4, 7), KVCache(GQA, 7)
    assert isinstance(cache, KVCache)
    assert (cache.layout, cache.total_blocks, cache.device) == (plain.layout, plain.total_blocks, plain.device)
    assert (cache.k.shape, cache.k.dtype, cache.v.shape) == (plain.k.shape, plain.k.dtype, plain.v.shape)
    assert cache.k.device.type == "meta"  # no bytes
    assert poisoned(LATENT, 2, 7).v.shape == KVCache(LATENT, 7).v.shape
    assert cache.mark() is None
    cache.settle()


def test_ranks_that_do_not_fit_are_refused() -> None:
    own = rank_layout(GQA, 2)
    with pytest.raises(ValueError, match=r"caches of ranks \[1\] are not 3 blocks"):
        ShardedCache(GQA, [KVCache(own, 3), KVCache(own, 4)])
    with pytest.raises(ValueError, match=r"ranks \[0, 1\]"):
        ShardedCache(GQA, [KVCache(GQA, 3), KVCache(GQA, 3)])
    with pytest.raises(ConfigError, match="8 KV heads cannot be divided among 3 ranks"):
        ShardedCache(GQA, [KVCache(own, 3)] * 3)


def test_on_gpus_mark_and_settle_are_for_all_of_them(monkeypatch) -> None:
    """Not run on GPUs: only the calls of torch are checked."""
    streams, event, own = {f"cuda:{index}": Mock() for index in (2, 3, 4)}, Mock(), rank_layout(GQA, 4)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[str(device)])
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    storage = KVCache(own, 2).tensors
    cache = ShardedCache(GQA, [KVCache(own, 2, f"cuda:{index}", storage=storage) for index in (2, 3, 4, 4)])
    assert cache.device == torch.device("cuda", 2)
    mark = cache.mark()
    assert mark is not None
    event.record.assert_called_once_with(streams["cuda:2"])
    mark.wait()
    cache.settle()
    for stream in streams.values():
        stream.wait_event.assert_called_once_with(event)
        assert stream.synchronize.called
