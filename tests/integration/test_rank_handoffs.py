"""Handoffs between workers of different tensor-parallel sizes, with ranks in processes: KV, tokens, order and ends.

`tests/unit/kvtransfer/test_ranks.py` has more layouts, with ranks in threads.
"""

import os
import queue
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.engine import Engine
from baton.engine.kernels.kv_levels import KVDtype
from baton.engine.kv_cache import KVCache
from baton.engine.memory.exposed import MappedMemory
from baton.engine.models.fallback.loading import load_transformers
from baton.engine.models.loading import load_model
from baton.engine.sequence import ScheduledSequence
from baton.engine.tp.backend import Ranking, load_sharded
from baton.errors import RankLost
from kvtransfer.frames import FrameSpec
from kvtransfer.handoff import PushEnd
from kvtransfer.transports.base import Places
from kvtransfer.transports.shm import MappedPool
from tests.support.engines import Streams, engine_of, ids, key_of, numbers, reserved, run, spec_of
from tests.support.time_factor import scaled
from tests.unit.kvtransfer.support import SMALL_FRAMES, Pairs
from tests.unit.kvtransfer.test_ranks import SIZES, over
from tests.unit.model.checkpoints import NATIVE, RECURRENT, SPARSE, random_checkpoint
from tests.unit.tp.support import copies
from tools import fallback_models

pytestmark = pytest.mark.slow
BLOCK, KV_HEADS = 8, 2
Backends = Callable[..., Any]


@pytest.fixture(scope="module")
def backend_of(tmp_path_factory) -> Iterator[Backends]:
    """Models on 1, 2 or 4 ranks, which several tests use in turn. Four ranks share two KV heads."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": KV_HEADS}
    random_checkpoint(folder, "llama", vocab_size=259, num_hidden_layers=3, **heads)
    with ExitStack() as stack:

        @cache
        def loaded(size: int, kv_dtype: KVDtype = "auto") -> Any:
            if size == 1:
                return load_model(folder, block_size=BLOCK, kv_dtype=kv_dtype)
            ranks = load_sharded(folder, Ranking(size, threads=1), block_size=BLOCK, kv_dtype=kv_dtype)
            return stack.enter_context(closing(ranks))

        yield loaded


def layer_of(engine: Engine, layer: int, blocks: list[int], end: int) -> torch.Tensor:
    return engine.kv.copied(range(layer, layer + 1), blocks, 0, end)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("transport", ["shm", "gloo", "nixl"])
@pytest.mark.parametrize(("sender", "receiver"), [pair for pair in SIZES if len({*pair}) == 2])
def test_the_kv_and_the_tokens_are_those_of_one_process(
    backend_of: Backends, transport: str, sender: int, receiver: int, kv_dtype: KVDtype
) -> None:
    """Frames leave layer by layer, in chunks, while the ranks compute."""
    alone, giver, taker = (backend_of(size, kv_dtype) for size in (1, sender, receiver))
    check_handoff(alone, giver, taker, transport)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_model_in_transformers_hands_over_its_kv(transport: str, tmp_path: Path) -> None:
    """Frames leave layer by layer, in chunks, while transformers computes the layers behind them."""
    fallback_models.write("gemma2", tmp_path, vocab_size=259)
    alone, sender, receiver = (load_transformers(tmp_path, dtype="float32", block_size=BLOCK) for _ in range(3))
    check_handoff(alone, sender, receiver, transport)


@pytest.mark.sample(1)
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "gemma4", "qwen3_next", "granite-hybrid", "lfm2"])
def test_other_families_hand_over_to_ranks(family: str, tmp_path: Path, back: bool) -> None:
    """One rank computes the prompt, and two processes continue, or the other way round. States of recurrent layers
    travel with the commit.
    """
    (NATIVE | SPARSE | RECURRENT)[family].write(tmp_path, vocab_size=259)
    alone, one = (load_model(tmp_path, block_size=BLOCK) for _ in range(2))
    with closing(load_sharded(tmp_path, Ranking(2, threads=1), block_size=BLOCK)) as two:
        sender, receiver = (two, one) if back else (one, two)
        check_handoff(alone, sender, receiver, "shm")


def check_handoff(alone: Any, sender: Any, receiver: Any, transport: str) -> None:
    """Check the KV and the tokens of a prompt from `sender` to `receiver` against one worker `alone`."""
    prompt = spec_of(numbers(random.Random(7), 60), max_tokens=8)
    expected = run(engine_of(alone, 24), [prompt]).ids(key_of(0))
    giver = engine_of(sender, 24, max_batched_tokens=25, exposed=transport == "shm")
    taker, made, pairs = engine_of(receiver, 24), over(transport), Pairs()
    room, key = reserved(taker, len(prompt)), key_of()
    pair = pairs(
        SMALL_FRAMES, source=giver.kv, target=taker.kv, send=lambda _: [made(giver.kv)], recv=lambda _: [made(taker.kv)]
    )
    job = pair.begin(key.request_id, len(prompt), room.blocks)

    def announce(work: list[ScheduledSequence], layer: int) -> None:
        for item in work:
            assert item.sequence.allocation is not None
            end = item.sequence.computed + item.count
            pair.sender.computed(job.handoff, item.sequence.allocation.blocks, layer + 1, end)

    giver.watch(announce, lambda sequence: None)
    giver.submit(key, prompt, hold=True)
    first = Streams().drain(giver).tokens[key]
    known = replace(prompt, known=(*prompt.known, *ids(first)))
    pair.sender.finish(job.handoff, PushEnd(known, first, giver.state_of(key)))
    assert pair.reports.done(job.handoff).transport == transport
    every, span = range(taker.layout.layers), (0, len(prompt))
    sent = giver.kv.copied(every, giver.held(key).blocks, *span)
    for copy in copies(taker.kv):
        assert torch.equal(copy.copied(every, room.blocks, *span), sent)
    pairs.close()
    taker.adopt(key, known, room, pair.table.commits[job.handoff].state)
    assert ids(first) + Streams().drain(taker).ids(key) == expected


@dataclass(frozen=True)
class Announced:
    """KV of one layer, as rank 0 announced it, with the bytes that it had then."""

    frame: FrameSpec
    places: Places
    kv: torch.Tensor


class Reader(threading.Thread):
    """Reads announced KV from the pool again and again until its blocks are given away. Rejects other bytes."""

    def __init__(self, kv: KVCache) -> None:
        super().__init__(daemon=True)
        assert kv.exposed is not None
        memory = MappedMemory(kv.exposed.file, kv.exposed.shape)
        self.pool = MappedPool(KVCache(kv.layout, 1).reader_of(kv.layout, kv.total_blocks, memory.kv), memory)
        self.announced: queue.SimpleQueue[Announced | None] = queue.SimpleQueue()
        self.right = self.stale = 0
        self.wrong = list[FrameSpec]()
        self.first = threading.Semaphore(0)  # released after the first read of each
        self._own = KVCache(kv.layout, kv.total_blocks)

    def read(self, what: Announced) -> bool:
        """Return whether the read counts."""
        ours = list(range(len(what.places.blocks)))
        if not self.pool.read(self._own, what.frame, what.places, ours):
            self.stale += 1
            return False
        self.right += 1
        if not torch.equal(self._own.copied(what.frame.layers, ours, what.frame.begin, what.frame.end), what.kv):
            self.wrong.append(what.frame)
        return True

    def run(self) -> None:
        open_: list[Announced] = []
        while True:
            new = not open_ or not self.announced.empty()
            if (what := self.announced.get() if new else open_.pop(0)) is None:
                break
            if self.read(what):
                open_.append(what)
            if new:
                self.first.release()
        for what in open_:
            self.read(what)


@pytest.mark.parametrize("size", [2, 4])
def test_no_byte_that_another_rank_wrote_later_counts(backend_of: Backends, size: int, seed: int) -> None:
    """Rank 0 raises the generation of a block. Then the other ranks write into it, while a reader copies."""
    engine, rng = engine_of(backend_of(size), 9, exposed=True, prefix_cache=False), random.Random(seed)
    reader = Reader(engine.kv)
    exposed = engine.kv.exposed

    def announce(work: list[ScheduledSequence], layer: int) -> None:
        for item in work:
            assert item.sequence.allocation is not None
            blocks, end = list(item.sequence.allocation.blocks), item.sequence.computed + item.count
            places = Places(blocks, [exposed.generations[block] for block in blocks])
            kv = layer_of(engine, layer, blocks, end)
            reader.announced.put(Announced(FrameSpec(layer, layer + 1, 0, end, len(kv)), places, kv))
            assert reader.first.acquire(timeout=scaled(20))

    engine.watch(announce, lambda sequence: None)
    reader.start()
    for name in range(12):
        run(engine, {key_of(name): spec_of(numbers(rng, rng.randint(20, 60)), max_tokens=2)})
    reader.announced.put(None)
    reader.join(scaled(20))
    assert not reader.is_alive()
    assert not reader.wrong
    assert reader.right > 10
    assert reader.stale > 10


def test_a_reader_outlives_a_killed_rank(backend_of: Backends, tmp_path) -> None:
    random_checkpoint(tmp_path / "m", "llama", vocab_size=259)
    with closing(load_sharded(tmp_path / "m", Ranking(2, threads=1), block_size=BLOCK)) as backend:
        engine = engine_of(backend, 9, exposed=True)
        engine.submit(key_of(), prompt := spec_of(range(40)), hold=True)
        Streams().drain(engine)
        blocks, reader = list(engine.held(key_of()).blocks), Reader(engine.kv)
        places = Places(blocks, [engine.kv.exposed.generations[block] for block in blocks])
        kv = layer_of(engine, 1, blocks, 40)
        os.kill(backend.pids[0], signal.SIGKILL)
        engine.submit(key_of("next"), prompt)
        with pytest.raises(RankLost):
            Streams().drain(engine)
    assert reader.read(Announced(FrameSpec(1, 2, 0, 40, len(kv)), places, kv))
    assert not reader.wrong
