"""Checked engines: all their output equals the oracle's, even when their ordinary batches are wrong.

Their free blocks are poisoned and their accesses are checked, to find use of a foreign block.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from baton.core import HandoffId, PromptToken, Role, SequenceSpec, SequenceState, Token
from baton.engine.block_pool import BlockPool
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.engine import Engine
from baton.engine.kv_cache import KVCache
from baton.engine.oracle import OracleBackend, oracle_layout
from router.audit_digest import Delivered, audit_digest

if TYPE_CHECKING:
    from torch import Tensor

    from baton.engine.batch import Batch
    from baton.engine.block_pool import Reservation
    from baton.engine.step_result import SequenceOutput, StepResult
    from tests.simulation.worker import WorkerPlan
    from tests.simulation.world import World

BLOCK = 4
LAYOUT = oracle_layout(block_size=BLOCK, kv_heads=1, head_dim=2)
MAX_LEN = 64
POISON = -1.25e30


class PoisonedPool(BlockPool):
    """A pool that fills each block with poison when it is freed."""

    kv: CheckedCache | None = None

    def _take(self) -> int:
        block = super()._take()
        self._poison(block)
        return block

    def _retire(self, block: int) -> None:
        super()._retire(block)
        if block not in self._cached:
            self._poison(block)

    def _poison(self, block: int) -> None:
        if self.kv is not None:
            for tensor in self.kv.tensors:
                tensor[:, block] = POISON

    def untouched(self) -> bool:
        """Return whether no free block was written."""
        assert self.kv is not None
        return all(bool((tensor[:, self._free] == POISON).all()) for tensor in self.kv.tensors)

    def held(self, block: int) -> bool:
        return self._references[block] > 0

    def writable(self, block: int) -> bool:
        """Return whether the block has one reference and is not in the prefix cache."""
        return self._references[block] == 1 and self._digest[block] is None


Fine = Callable[[PoisonedPool, int], bool]


class CheckedCache(KVCache):
    """Checks transfers: they read only referenced blocks, and write only uncached blocks with one reference."""

    def __init__(self, total_blocks: int) -> None:
        shape = (LAYOUT.layers, total_blocks, BLOCK, LAYOUT.kv_heads, LAYOUT.head_dim)
        storage = [torch.full(shape, POISON) for _ in LAYOUT.tensors]
        super().__init__(LAYOUT, total_blocks, storage=storage)
        self.pool: PoisonedPool | None = None
        self.world: World | None = None
        self.name = ""

    def gather(self, layers: range, blocks: Sequence[int], begin: int, end: int, out: Tensor) -> None:
        self._check("reads", blocks, begin, end, PoisonedPool.held)
        super().gather(layers, blocks, begin, end, out)

    def scatter(self, layers: range, blocks: Sequence[int], begin: int, end: int, data: Tensor) -> None:
        self._check("writes", blocks, begin, end, PoisonedPool.writable)
        super().scatter(layers, blocks, begin, end, data)

    def _check(self, does: str, blocks: Sequence[int], begin: int, end: int, fine: Fine) -> None:
        assert self.pool is not None
        assert self.world is not None
        wrong = [block for block in blocks[begin // BLOCK : -(-end // BLOCK)] if not fine(self.pool, block)]
        if wrong:
            self.world.broken(f"{self.name}: a transfer {does} blocks {wrong} that are not its own")


class SimBackend(OracleBackend):
    """The oracle over checked caches. All engines share one, because it has no state."""

    def make_cache(self, total_blocks: int, *, exposed: bool = False) -> KVCache:
        return CheckedCache(total_blocks)


BACKEND = SimBackend(LAYOUT, max_model_len=MAX_LEN)


@cache
def _expected(plain: SequenceSpec) -> list[int]:
    return BACKEND.expected(plain)


def expected(spec: SequenceSpec) -> list[int]:
    """Return all output tokens of a request, including `spec.known`."""
    return _expected(SequenceSpec(spec.prompt, spec.sampling, constraint=spec.constraint))


class Straying(SimBackend):
    """The oracle, but its ordinary batches often give deterministic sequences a wrong next token, or wrong KV. `rate`:
    the frequency of each of both; `rng`: when.
    """

    rng: random.Random
    rate: float
    engine: WatchedEngine

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        logits = super().forward(batch, kv)
        first = self.engine.first_blocks() if self.rate and not batch.fixed else set[int]()
        if first:
            self._stray(batch, kv, logits, first)
        return logits

    def _stray(self, batch: Batch, kv: KVCache, logits: Tensor, first: set[int]) -> None:
        ends, wanted = (batch.query_starts[1:] - 1).tolist(), batch.logit_rows.tolist()
        for end, block in zip(ends, batch.block_tables[:, 0].tolist(), strict=True):
            if block not in first:
                continue
            if self.rng.random() < self.rate:
                logits[wanted.index(end)] = logits[wanted.index(end)].roll(self.rng.randrange(1, 256))
            if self.rng.random() < self.rate:
                for tensor in kv.tensors:
                    tensor.flatten(1, 2)[:, batch.slot_mapping[end]] = self.rng.random()


_STRAYING = Straying(LAYOUT, max_model_len=MAX_LEN)  # copied, so that all share its cache of hashes


class WatchedEngine(Engine):
    """Reports a token immediately that is not the oracle's, is out of order, or follows the end."""

    world: World
    name: str

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._specs: dict[HandoffId, SequenceSpec] = {}
        self._next: dict[HandoffId, int] = {}  # index of the next token, or -1 after the end

    def first_blocks(self) -> set[int]:
        """Return the first blocks of deterministic sequences. No other sequence has these."""
        found = (request.sequence for request in self._requests.values() if request.draft is not None)
        return {sequence.allocation.blocks[0] for sequence in found if sequence.allocation is not None}

    def submit(self, key: HandoffId, spec: SequenceSpec, *, hold: bool = False) -> Sequence[int]:
        tokens = super().submit(key, spec, hold=hold)
        self._specs[key], self._next[key] = spec, len(spec.known)
        return tokens

    def adopt(
        self, key: HandoffId, spec: SequenceSpec, reservation: Reservation, state: SequenceState | None = None
    ) -> Sequence[int]:
        tokens = super().adopt(key, spec, reservation, state)
        self._specs[key], self._next[key] = spec, len(spec.known)
        return tokens

    def rename(self, key: HandoffId, new: HandoffId) -> None:
        super().rename(key, new)
        self._specs[new], self._next[new] = self._specs[key], self._next[key]

    def step(self) -> StepResult:
        before, running = replace(self.counters), [s for s in self._scheduler.running if s.own_forwards]
        result = super().step()
        for output in result.outputs:
            self._check(output)
        met, waiting = self.world.met, self._scheduler.waiting
        met["verify pass"] += self.counters.verify_passes - before.verify_passes
        met["rollback"] += self.counters.rollbacks - before.rollbacks
        met["deterministic preempted"] += sum(s.key in result.preempted or s in waiting for s in running)
        return result

    def _check(self, output: SequenceOutput) -> None:
        wanted, at = expected(self._specs[output.key]), self._next[output.key]
        said = [(token.index, token.token_id) for token in output.tokens]
        right = [*enumerate(wanted)][at : at + len(said)]
        ends = at + len(said) == len(wanted)
        if at < 0 or said != right or (output.finish is not None and not ends):
            self.world.broken(f"{self.name}: {output.key} says {said} and {output.finish} at {at} of {wanted}")
        self._next[output.key] = -1 if output.finish else at + len(said)


def engine_of(world: World, name: str, plan: WorkerPlan) -> WatchedEngine:
    """Return a real engine with a checked pool and cache."""
    backend = copy(_STRAYING)
    backend.rng, backend.rate = world.random_for(f"{name} strays"), plan.strays
    engine = WatchedEngine(
        backend,
        backend.tokenizer,
        total_blocks=plan.blocks,
        max_batched_tokens=plan.batched,
        max_running=plan.running,
        recompute_preempted=plan.role is Role.PREFILL,
        shapes=plan.shapes,
    )
    backend.engine, engine.world, engine.name = engine, world, name
    pool, kv = engine.pool, engine.kv
    assert isinstance(pool, PoisonedPool)
    assert isinstance(kv, CheckedCache)
    pool.kv, kv.pool, kv.world, kv.name = kv, pool, world, name
    return engine


@cache
def _alone() -> Engine:
    """Return an engine for one request at a time, without a prefix cache and wrong candidates."""
    backend = OracleBackend(LAYOUT, max_model_len=MAX_LEN)
    shapes = FixedShapes(1, 32)
    return Engine(backend, backend.tokenizer, total_blocks=MAX_LEN // BLOCK + 1, prefix_cache=False, shapes=shapes)


@cache
def undisturbed_scores(spec: SequenceSpec) -> list[PromptToken]:
    """Return the scored prompt of a request that runs alone."""
    engine, found = _alone(), [PromptToken(spec.prompt[0])]
    engine.submit(HandoffId("alone", 1), spec)
    while engine.has_work():
        for _, part in engine.step().prompts:
            found += part.tokens
    return found


def same_scores(left: Sequence[PromptToken], right: Sequence[PromptToken]) -> bool:
    """Return whether scores are equal, but for the rounding of float32 in batches of other shapes."""
    for one, other in zip(left, right, strict=True):
        if (one.token_id, one.rank) != (other.token_id, other.rank):
            return False
        if one.logprobs is None or other.logprobs is None:
            if one.logprobs != other.logprobs:
                return False
        elif abs(one.logprobs.logprob - other.logprobs.logprob) > 1e-4:
            return False
    return True


def undisturbed(spec: SequenceSpec) -> str:
    """Return the audit digest of a deterministic request that runs alone."""
    engine, tokens = _alone(), list[Token]()
    engine.submit(HandoffId("alone", 1), spec)
    while engine.has_work():
        tokens += [token for output in engine.step().outputs for token in output.tokens]
    ids, logprobs = [token.token_id for token in tokens], [token.logprobs for token in tokens if token.logprobs]
    return audit_digest(spec.prompt, spec.sampling, [Delivered(ids, logprobs)])
