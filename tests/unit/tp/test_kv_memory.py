"""KV of ranks: frames between workers of any sizes, and memory of separate GPUs.

Ranks are threads, and GPUs are main memory. Tests the order of allocating, opening, closing and freeing, and handoffs
of a model on such ranks. `tests/unit/gpu/test_ranks.py` runs on a machine with two GPUs.
"""

import errno
import gc
import itertools
import mmap
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from baton.core import KVLayout
from baton.engine.engine import Engine
from baton.engine.kv_cache import KVCache
from baton.engine.memory.exposed import MappedMemory
from baton.engine.models.loading import load_model
from baton.engine.sequence import ScheduledSequence
from baton.engine.tp.backend import ShardedBackend
from baton.engine.tp.group import CACHE, END, Ranks, TpLayout
from baton.engine.tp.kv_memory import GpuMemory, ShardedCache, rank_layout
from baton.engine.tp.rank_model import RankModel
from baton.engine.tp.sharding import Heads
from baton.errors import ConfigError, RankLost
from baton.tokenizer import OracleTokenizer
from baton.worker.engine_factory import generate
from tests.support.engines import hand_over, ids, key_of, numbers, spec_of
from tests.support.time_factor import scaled
from tests.unit.model.checkpoints import RECURRENT, random_checkpoint
from tests.unit.tp.support import (
    GQA,
    LATENT,
    LAYOUTS,
    copies,
    gpus,
    memory_of,
    on_a_cpu,
    on_threads,
    poisoned,
    put,
    same,
    started,
    whole,
    wire_of,
)

PAIRS = list(itertools.product((1, 2, 4, 8), (1, 2, 4, 8)))
TOKENS, TOTAL = 23, 20


def some_blocks(rng: random.Random, layout: KVLayout) -> list[int]:
    return rng.sample(range(TOTAL), layout.blocks_for(TOKENS))


def gathered(cache: KVCache, layers: range, blocks: list[int], begin: int, end: int) -> torch.Tensor:
    out = torch.full((len(layers) * (end - begin) * cache.layout.layer_token_bytes,), 0xAA, dtype=torch.uint8)
    cache.gather(layers, blocks, begin, end, out)
    return out


@pytest.mark.sample(20)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.kv_heads}-{layout.dtype}-{layout.tensors[0]}")
@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
def test_frames_between_workers_of_any_sizes(sender: int, receiver: int, layout: KVLayout, seed: int) -> None:
    """A prompt without its skipped part, in frames of any layers and positions, between blocks of different sizes. The
    frames travel in wire order, or from the memory of each rank to that of each rank.
    """
    rng, kv = random.Random(seed), whole(layout, TOKENS, seed)
    source = poisoned(replace(layout, block_size=rng.randint(2, 7)), sender, TOTAL)
    target = poisoned(replace(layout, block_size=rng.randint(2, 7)), receiver, TOTAL)
    there, here = some_blocks(rng, source.layout), some_blocks(rng, target.layout)
    put(source, there, kv)
    skip, cut, row = rng.randint(0, 4), rng.randint(5, TOKENS - 1), rng.randint(1, layout.layers - 1)
    copied = poisoned(target.layout, receiver, TOTAL)
    before = poisoned(source.layout, sender, TOTAL)
    put(before, there, kv)
    for layers, (begin, end) in itertools.product(
        (range(row, layout.layers), range(row)), ((cut, TOKENS), (skip, cut))
    ):
        wire = gathered(source, layers, there, begin, end)
        assert torch.equal(wire, wire_of(kv, layers, begin, end))
        target.scatter(layers, here, begin, end, wire)
        copied.copy_from(source, layers, there, here, begin, end)
    expected = poisoned(target.layout, receiver, TOTAL)
    kv[:, :, :skip] = float("nan")  # nothing is written there
    put(expected, here, kv)
    assert same(target, expected)
    assert same(copied, expected)
    assert same(source, before)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.kv_heads}-{layout.dtype}-{layout.tensors[0]}")
@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_on_a_cpu_share_their_memory(plan_of, size: int, layout: KVLayout, seed: int) -> None:
    """Rank 0 reads what each rank has written, and writes what each of them reads, in the wire's order."""
    seen, ranks = on_a_cpu(plan_of(size), layout, TOTAL)
    assert (seen.layout, seen.total_blocks, seen.exposed) == (layout, TOTAL, None)
    heads = Heads(layout.kv_heads, size)
    for rank, own in enumerate(ranks):
        own.k.fill_(rank)
    for number, copy in enumerate(copies(seen)):  # no two ranks write to one place
        holders = [[rank for rank in range(size) if head in heads.held(rank)] for head in range(layout.kv_heads)]
        assert copy.k[0, 0, 0, :, 0].tolist() == [each[number] for each in holders]
    for own in ranks:
        own.k.zero_()
    rng, kv, other = random.Random(seed), whole(layout, TOKENS, seed), whole(layout, TOKENS, seed + 1)
    blocks, layers = some_blocks(rng, layout), range(layout.layers)
    put(ShardedCache(layout, ranks), blocks, kv)
    assert torch.equal(gathered(seen, layers, blocks, 0, TOKENS), wire_of(kv, layers, 0, TOKENS))
    seen.scatter(layers, blocks, 0, TOKENS, wire_of(other, layers, 0, TOKENS))
    expected = ShardedCache(layout, [KVCache(rank_layout(layout, size), TOTAL) for _ in ranks])
    put(expected, blocks, other)
    assert same(ShardedCache(layout, ranks), expected)


def test_a_process_with_the_descriptor_of_exposed_memory_can_only_read_it(plan_of) -> None:
    """The ranks mapped it before it was sealed, so they can write."""
    seen, ranks = on_a_cpu(plan_of(2), GQA, 3, exposed=True)
    memory = seen.exposed
    assert memory is not None
    with pytest.raises(PermissionError):
        mmap.mmap(memory.file, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.file, 0)
    reader = MappedMemory(memory.file, memory.shape)
    ranks[1].k.fill_(2.0)
    assert torch.equal(reader.kv, memory.kv)
    assert seen.k[..., :4, :].eq(0.0).all()
    assert seen.k[..., 4:, :].eq(2.0).all()


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
    for own, name, watched in calls:
        monkeypatch.setattr(own, name, watched)
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


def obey(plan: TpLayout, rank: int, on_gpus: list[Any]) -> None:
    ranks = Ranks(plan, rank, lambda: None)
    memory = memory_of(plan, ranks, GQA, on_gpus)
    while (message := ranks.receive()).kind != END:
        memory.make(message.numbers[0])
    memory.close()


@contextmanager
def obeyed(plan: TpLayout, on_gpus: list[Any]) -> Iterator[tuple[Ranks, GpuMemory]]:
    """Yield rank 0 and its memory. The other ranks make caches until the block ends."""
    ends = [started(obey, plan, rank, on_gpus) for rank in range(1, plan.size)]
    ranks = Ranks(plan, 0, lambda: None)
    yield ranks, memory_of(plan, ranks, GQA, on_gpus)
    ranks.send(END, [])
    for end in ends:
        end.result(scaled(10))


@pytest.mark.parametrize("size", [2, 4])
def test_rank_0_has_all_heads_and_nothing_is_freed_while_it_has(plan_of, size: int, seed: int) -> None:
    others, (on_gpus, log) = range(1, size), gpus(size)
    with obeyed(plan_of(size), on_gpus) as (ranks, memory):
        for round_, blocks in enumerate((3, 9)):
            del log[:]
            memory.prepare(exposed=False)
            assert log == [("close", rank) for rank in reversed(others) if round_]
            ranks.send(CACHE, [blocks])
            seen, own = memory.make(blocks)
            assert isinstance(seen, ShardedCache)
            assert (seen.layout, seen.total_blocks) == (GQA, blocks)
            assert seen.ranks[0] is own
            assert not any(tensor.any() for cache in seen.ranks for tensor in cache.tensors)  # memory was not empty
            kv = whole(GQA, 7, seed + round_)
            put(seen, [2, 1], kv)
            out = torch.empty(7 * 5 * GQA.layer_token_bytes, dtype=torch.uint8)
            seen.gather(range(5), [2, 1], 0, 7, out)
            assert torch.equal(out, wire_of(kv, range(5), 0, 7))
            for rank in others:  # it is in the rank's own memory
                (there,) = on_gpus[rank].memory.values()
                held = torch.cat([tensor.flatten() for tensor in seen.ranks[rank].tensors])
                assert torch.equal(there, held.view(torch.uint8))
                assert len(on_gpus[rank].opened) == 1
                does = [what for what, which in log if which == rank]
                assert does == (["close", "free"] if round_ else []) + ["allocate", "open"]
            assert not on_gpus[0].memory
        memory.close()
    assert not any(gpu.memory or gpu.opened for gpu in on_gpus)


def test_what_was_opened_is_closed_if_the_rest_cannot_be(plan_of) -> None:
    on_gpus, log = gpus(4)
    with obeyed(plan_of(4), on_gpus) as (ranks, memory):
        on_gpus[3].handle = lambda address: bytes(64)  # one that no process can open
        ranks.send(CACHE, [3])
        with pytest.raises(RuntimeError, match="INVALID_VALUE"):
            memory.make(3)
        assert [each for each in log if each[0] == "close"] == [("close", 2), ("close", 1)]
        assert [len(gpu.memory) for gpu in on_gpus] == [0, 1, 1, 1]


def backend_of(plan: TpLayout, fails: str = "") -> tuple[ShardedBackend, Mock]:
    """Return a backend over doubles, and their parent, which has the calls in order. `fails` raises RuntimeError."""
    calls = Mock(**{f"{fails}.side_effect": RuntimeError(f"no {fails}")} if fails else {})
    calls.followers.explain = lambda error: RankLost(str(error))
    model = RankModel(calls.local, calls.ranks, calls.memory)
    return ShardedBackend(plan, model, calls.ranks, calls.followers, calls.memory), calls


def test_rank_0_lets_go_before_the_others_may(plan_of) -> None:
    backend, calls = backend_of(plan_of(2))
    calls.memory.make.return_value = made, _ = Mock(), Mock()
    assert backend.make_cache(3) is made
    assert calls.mock_calls == [call.memory.prepare(exposed=False), call.ranks.send(CACHE, [3]), call.memory.make(3)]
    calls.reset_mock()
    backend.close()
    backend.close()
    assert calls.mock_calls == [call.memory.close(), call.ranks.send(END, []), call.followers.close(2.0)]
    with pytest.raises(RankLost, match="have ended"):
        backend.make_cache(3)
    backend, calls = backend_of(plan_of(2), "memory.close")
    with pytest.raises(RuntimeError):
        backend.close()
    assert calls.mock_calls == [call.memory.close(), call.followers.close(2.0)], "even if it cannot let go"


@pytest.mark.parametrize("fails", ["ranks.send", "memory.make"])
def test_a_cache_that_cannot_be_made_ends_the_worker(plan_of, fails: str) -> None:
    """No rank waits for a GPU then, because a lost rank may block it forever."""
    backend, calls = backend_of(plan_of(2), fails)
    with pytest.raises(RankLost, match=f"no {fails}"):
        backend.make_cache(3)
    assert calls.mock_calls[-1] == call.followers.close(0.0)
    assert not calls.memory.close.called
    with pytest.raises(RankLost, match="have ended"):
        backend.make_cache(3)
    backend.close()
    calls.followers.close.assert_called_once_with(0.0)


@pytest.mark.parametrize("call", ["memfd_create", "posix_fallocate"])
def test_states_without_memory_are_refused_before_the_ranks_map_them(plan_of, tmp_path, monkeypatch, call) -> None:
    RECURRENT["lfm2"].write(tmp_path / "m")
    backend = on_threads(plan_of(2, str(tmp_path / "m")), [])
    cache = backend.make_cache(4)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, Mock(side_effect=OSError(errno.ENOSPC, "no space")))
        with pytest.raises(ConfigError, match=r"^kv_memory: no memory of \d+ bytes"):
            cache.make_states(3)
    assert cache.make_states(3).rows.count_nonzero() == 0, "the ranks can continue"
    backend.close()


def mappings(name: str) -> int:
    return Path("/proc/self/maps").read_text().count(f"memfd:{name} ")


def test_the_memory_of_a_dropped_cache_is_freed_without_a_collection(plan_of, tmp_path) -> None:
    """Both ranks map it."""
    RECURRENT["lfm2"].write(tmp_path / "m")
    backend = on_threads(plan_of(2, str(tmp_path / "m")), [])
    gc.collect()
    gc.disable()
    before = [mappings(name) for name in ("baton-kv", "baton-states")]
    try:
        for _ in range(3):
            backend.make_cache(4).make_states(3)
        assert [mappings(name) for name in ("baton-kv", "baton-states")] == [before[0] + 2, before[1] + 2]
        backend.close()
        assert [mappings(name) for name in ("baton-kv", "baton-states")] == before
    finally:
        gc.enable()


@pytest.mark.parametrize("size", [2, 4])
def test_a_layer_is_reported_after_all_ranks_have_written_it(plan_of, tmp_path, monkeypatch, size: int) -> None:
    """The other ranks begin a forward only when rank 0 waits for their first parts. Four ranks share two KV heads."""
    random_checkpoint(tmp_path / "m", "llama", vocab_size=259, num_attention_heads=8, num_key_value_heads=2)
    backend = on_threads(plan_of(size, str(tmp_path / "m")), [])
    engine, swap, forward = (
        Engine(backend, OracleTokenizer(), total_blocks=24),
        backend._ranks.exchange.swap,
        RankModel.forward,
    )
    waiting, reports = threading.Event(), list[torch.Tensor]()

    def swapping() -> list[torch.Tensor]:
        waiting.set()
        return swap()

    def late(model: RankModel, *arguments: Any) -> torch.Tensor:
        assert model._ranks.rank == 0 or waiting.wait(scaled(20))
        return forward(model, *arguments)

    def report(work: list[ScheduledSequence], layer: int) -> None:
        assert work[0].sequence.allocation is not None
        blocks = work[0].sequence.allocation.blocks
        reports.extend(cache.copied(range(layer, layer + 1), blocks, 0, 40) for cache in copies(engine.kv))

    monkeypatch.setattr(backend._ranks.exchange, "swap", swapping)
    monkeypatch.setattr(RankModel, "forward", late)
    engine.watch(report, lambda sequence: None)
    engine.submit(key_of(), spec_of(range(40)), hold=True)
    engine.step()
    assert len(reports) == engine.layout.layers * len(copies(engine.kv))
    for number, reported in enumerate(reports):
        layer, copy = divmod(number, len(copies(engine.kv)))
        blocks = engine.held(key_of()).blocks
        final = copies(engine.kv)[copy].copied(range(layer, layer + 1), blocks, 0, 40)
        assert reported.any()
        assert torch.equal(reported, final)
    backend.close()


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_model_with_divided_caches_hands_over_and_takes_over(plan_of, tmp_path, kv_heads: int, size: int) -> None:
    random_checkpoint(tmp_path / "m", "llama", vocab_size=259, num_attention_heads=8, num_key_value_heads=kv_heads)
    rng = random.Random(7)  # always the same prompts: ranks add in another order, which decides near ties
    plan, (on_gpus, _) = plan_of(size, str(tmp_path / "m")), gpus(size)
    alone = load_model(tmp_path / "m", block_size=5)
    backend = on_threads(plan, on_gpus)
    assert backend.layout == replace(alone.layout, block_size=8)  # of all heads
    one, many = (Engine(b, OracleTokenizer(), total_blocks=24, prefix_cache=False) for b in (alone, backend))
    for _ in range(2):
        spec = spec_of(numbers(rng, rng.randint(20, 60), 250), max_tokens=6)
        expected = ids(generate(one, spec).tokens)
        assert ids(generate(many, spec).tokens) == expected
        for giver, taker in ((one, many), (many, one)):
            assert hand_over(giver, taker, spec).ids(key_of()) == expected
    with pytest.raises(ValueError, match="not the cache"):
        backend.forward(None, one.kv)  # type: ignore[arg-type]
    backend.close()
    assert not any(gpu.memory or gpu.opened for gpu in on_gpus)
