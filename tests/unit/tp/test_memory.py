"""KV that ranks hold on GPUs of their own, with ranks as threads and GPUs made of main memory.

Who allocates, opens, closes and frees, in which order; and a model on such ranks that hands over. What a GPU does to it
is for `tests/unit/gpu/test_ranks.py`, on a machine with two.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from baton.core import HandoffId, Sampling, SequenceSpec
from baton.engine.engine import Engine
from baton.engine.generate import generate
from baton.engine.model.build import load_model
from baton.engine.outcome import StepResult
from baton.engine.tp.backend import ShardedBackend
from baton.engine.tp.cache import ShardedCache
from baton.engine.tp.follower import follow
from baton.engine.tp.memory import GpuMemory, kv_memory
from baton.engine.tp.model import load_rank
from baton.engine.tp.ranks import CACHE, END, Plan, Ranks
from baton.errors import RankLost
from baton.tokenizer import OracleTokenizer
from tests.support.time_factor import scaled
from tests.unit.model.checkpoints import random_checkpoint
from tests.unit.tp.support import GQA, gpus, put, whole, wire_of


@pytest.fixture
def plan_of(tmp_path) -> Callable[..., Plan]:
    torch.set_num_threads(1)

    def plan(size: int, folder: str = "") -> Plan:
        return Plan(
            folder=folder,
            key="tensor_parallel",
            size=size,
            dtype="auto",
            device="cpu",
            block_size=8,
            max_model_len=None,
            threads=1,
            store=str(tmp_path / "store"),
            parent=os.getpid(),
            capacity=1 << 16,
            timeout_s=scaled(20.0),
        )

    return plan


def started(call: Callable, *arguments: Any) -> Future:
    """In a thread that ends with the process: a rank waits for rank 0 without a limit."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except Exception as error:  # noqa: BLE001  # the boundary of this thread
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def obey(plan: Plan, rank: int, on_gpus: list[Any]) -> None:
    """A rank that makes caches until the end, and computes nothing."""
    ranks = Ranks(plan, rank, lambda: None)
    memory = kv_memory(plan, ranks, GQA, on_gpus.__getitem__)
    while (message := ranks.hear()).kind != END:
        memory.make(message.numbers[0])
    memory.close()


@contextmanager
def obeyed(plan: Plan, on_gpus: list[Any]) -> Iterator[tuple[Ranks, GpuMemory]]:
    """Rank 0 and its memory; the other ranks make caches until the block ends."""
    ends = [started(obey, plan, rank, on_gpus) for rank in range(1, plan.size)]
    ranks = Ranks(plan, 0, lambda: None)
    memory = kv_memory(plan, ranks, GQA, on_gpus.__getitem__)
    assert isinstance(memory, GpuMemory)
    yield ranks, memory
    ranks.tell(END, [])
    for end in ends:
        end.result(scaled(10))


@pytest.mark.parametrize("size", [2, 4])
def test_rank_0_has_all_heads_and_nothing_is_freed_while_it_has(plan_of, size: int, seed: int) -> None:
    others, (on_gpus, log) = range(1, size), gpus(size)
    with obeyed(plan_of(size), on_gpus) as (ranks, memory):
        for round_, blocks in enumerate((3, 9)):
            del log[:]
            memory.prepare(blocks)
            assert log == [("close", rank) for rank in reversed(others) if round_]
            ranks.tell(CACHE, [blocks])
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
            for rank in others:  # it lies where the rank has it
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
    """And no rank frees: it has not heard that rank 0 is through."""
    on_gpus, log = gpus(4)
    with obeyed(plan_of(4), on_gpus) as (ranks, memory):
        on_gpus[3].handle = lambda address: bytes(64)  # one that no process can open
        ranks.tell(CACHE, [3])
        with pytest.raises(RuntimeError, match="INVALID_VALUE"):
            memory.make(3)
        assert [each for each in log if each[0] == "close"] == [("close", 2), ("close", 1)]
        assert [len(gpu.memory) for gpu in on_gpus] == [0, 1, 1, 1]


def test_all_ranks_hear_what_each_says(plan_of) -> None:
    plan = plan_of(3)
    said = [os.urandom(64) for _ in range(3)]
    heard = [started(lambda rank: Ranks(plan, rank, lambda: None).told(said[rank]), rank) for rank in range(3)]
    assert [each.result(scaled(10)) for each in heard] == [said] * 3


@dataclass
class Calls:
    """Stands for what ShardedBackend is made of, and notes what it is asked in which order."""

    log: list[str]
    fails: str = ""
    name, vocab_size, max_model_len, device, fingerprint, layout = "m", 9, 9, torch.device("cpu"), "f", GQA
    processes = ()

    def _note(self, what: str) -> None:
        self.log.append(what)
        if what == self.fails:
            raise RuntimeError(f"no {what}")

    def tell(self, kind: int, numbers: list[int]) -> None:
        self._note(f"tell {('END', 'CACHE')[kind]}")

    def prepare(self, total_blocks: int) -> None:
        self._note("prepare")

    def make(self, total_blocks: int) -> tuple[str, str]:
        self._note("make")
        return "whole", "own"

    def explain(self, error: Exception) -> RankLost:
        return RankLost(str(error))

    def close(self, patience_s: float | None = None) -> None:
        self._note("let go" if patience_s is None else f"end within {patience_s:g} s")


def backend_of(plan: Plan, fails: str = "") -> tuple[ShardedBackend, list[str]]:
    calls = Calls([], fails)
    return ShardedBackend(plan, calls, calls, calls, calls), calls.log  # type: ignore[arg-type]


def test_rank_0_lets_go_before_the_others_may(plan_of) -> None:
    backend, log = backend_of(plan_of(2))
    assert str(backend.make_cache(3)) == "whole"
    assert log == ["prepare", "tell CACHE", "make"]
    del log[:]
    backend.close()
    backend.close()
    assert log == ["let go", "tell END", "end within 2 s"]
    with pytest.raises(RankLost, match="have ended"):
        backend.make_cache(3)


def test_the_others_end_even_if_it_cannot_let_go(plan_of) -> None:
    backend, log = backend_of(plan_of(2), "let go")
    with pytest.raises(RuntimeError):
        backend.close()
    assert log == ["let go", "end within 2 s"]


@pytest.mark.parametrize("fails", ["tell CACHE", "make"])
def test_a_cache_that_cannot_be_made_ends_the_worker(plan_of, fails: str) -> None:
    """Nobody waits for a GPU then: a lost rank may hold it up for ever."""
    backend, log = backend_of(plan_of(2), fails)
    with pytest.raises(RankLost, match=f"no {fails}"):
        backend.make_cache(3)
    assert log[-2:] == [fails, "end within 0 s"]
    assert "let go" not in log
    with pytest.raises(RankLost, match="have ended"):
        backend.make_cache(3)
    backend.close()
    assert log[-1] == "end within 0 s"


@dataclass
class Threads:
    """Followers that are threads of this process."""

    ends: list[Future]
    processes = ()

    def explain(self, error: Exception) -> Exception:
        raise error

    def close(self, patience_s: float) -> None:
        for end in self.ends:
            end.result(scaled(20))


def on_threads(plan: Plan, on_gpus: list[Any]) -> ShardedBackend:
    """A model on ranks with a cache each, as on GPUs; sums go over gloo."""
    ends = [started(follow, plan, rank, on_gpus.__getitem__) for rank in range(1, plan.size)]
    ranks = Ranks(plan, 0, lambda: None)
    local = load_rank(plan, ranks)
    memory = kv_memory(plan, ranks, local.layout, on_gpus.__getitem__)
    assert isinstance(memory, GpuMemory)
    return ShardedBackend(plan, local, ranks, Threads(ends), memory)  # type: ignore[arg-type]


def carried(giver: Engine, taker: Engine, spec: SequenceSpec) -> list[int]:
    """Prefill here, hand over, decode there: all tokens."""
    key = HandoffId("r", 0)
    giver.submit(key, spec, hold=True)
    (first,) = [token for result in steps(giver) for output in result.outputs for token in output.tokens]
    blocks, tokens = giver.held(key).blocks, len(spec)
    layers = range(giver.layout.layers)
    wire = torch.empty(len(layers) * tokens * giver.layout.layer_token_bytes, dtype=torch.uint8)
    giver.kv.gather(layers, blocks, 0, tokens, wire)
    giver.release(key)
    room = taker.reserve(tokens)
    assert room is not None
    taker.kv.scatter(layers, room.blocks, 0, tokens, wire)
    taker.kv.settle()
    taker.adopt(key, replace(spec, known=(first.token_id,)), room)
    rest = [token for result in steps(taker) for output in result.outputs for token in output.tokens]
    return [token.token_id for token in (first, *rest)]


def steps(engine: Engine) -> Iterator[StepResult]:
    while engine.has_work():
        yield engine.step()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_model_with_divided_caches_hands_over_and_takes_over(plan_of, tmp_path, size: int, seed: int) -> None:
    random_checkpoint(tmp_path / "m", "llama", vocab_size=259, num_attention_heads=8, num_key_value_heads=4)
    rng = random.Random(seed)
    plan, (on_gpus, _) = plan_of(size, str(tmp_path / "m")), gpus(size)
    alone = load_model(tmp_path / "m", block_size=5)
    backend = on_threads(plan, on_gpus)
    assert backend.layout == replace(alone.layout, block_size=8)  # of all heads
    one, many = (Engine(b, OracleTokenizer(), total_blocks=24, prefix_cache=False) for b in (alone, backend))
    for _ in range(2):
        prompt = tuple(rng.randrange(1, 250) for _ in range(rng.randint(20, 60)))
        spec = SequenceSpec(prompt, Sampling(max_tokens=6, temperature=0.0, ignore_eos=True))
        expected = [token.token_id for token in generate(one, spec).tokens]
        assert [token.token_id for token in generate(many, spec).tokens] == expected
        assert carried(one, many, spec) == expected
        assert carried(many, one, spec) == expected
    with pytest.raises(ValueError, match="not the cache"):
        backend.forward(None, one.kv)  # type: ignore[arg-type]
    backend.close()
    assert not any(gpu.memory or gpu.opened for gpu in on_gpus)
