"""Reservations for KV from another worker: cached blocks are shared, never written, and all are freed."""

import pytest
import torch

from baton.engine.block_pool import BlockPool, BlockState
from baton.worker.engine_factory import generate
from tests.support import engines
from tests.support.engines import BLOCK, block_names, engine_of, key_of, reserved, spec_of

PROMPT = "what is the largest ocean?"  # 26 tokens: 6 full blocks


@pytest.fixture(scope="module")
def names(backend):
    return block_names(backend, tuple(PROMPT.encode()))


def warm_engine(backend, total_blocks=40):
    engine = engine_of(backend, total_blocks)
    generate(engine, spec_of(PROMPT))
    return engine


def handed_over(backend, receiver, spec, prefix):
    room = reserved(receiver, len(spec), prefix)
    shared, cached = room.shared.blocks, room.cached_tokens
    before = receiver.kv.k[:, shared].view(torch.int32).clone()
    found = engines.hand_over(engine_of(backend), receiver, spec, room).ids(key_of())
    assert torch.equal(receiver.kv.k[:, shared].view(torch.int32), before), "a shared block was written"
    return found, cached


@pytest.mark.parametrize("which", ["head", "own"])
@pytest.mark.parametrize("state", [BlockState.RESERVED, BlockState.QUARANTINED, BlockState.RELEASED])
def test_only_owned_blocks_are_prepended_and_to_owned_ones(which, state):
    pool = BlockPool(8)
    parts = {"head": engines.allocated(pool, 2), "own": engines.allocated(pool, 2)}
    odd = parts[which] = engines.allocated(pool, 2, reserved=state is BlockState.RESERVED)
    if state is BlockState.QUARANTINED:
        odd.quarantine()
    if state is BlockState.RELEASED:
        odd.release()
    before = [(part.blocks, part.state) for part in parts.values()]
    with pytest.raises(ValueError, match=state.value):
        parts["own"].prepend(parts["head"])
    assert [(part.blocks, part.state) for part in parts.values()] == before


@pytest.mark.parametrize(
    ("known", "asked", "cached"),
    [
        (26, 6, 24),  # six full blocks and two positions more
        (26, 2, 8),  # the router may name fewer
        (26, 0, 0),
        (24, 6, 20),  # the last position always comes, and its block with it
        (25, 6, 24),
        (4, 1, 0),
        (5, 1, 4),
        (9, 6, 8),  # more hashes than full blocks of known tokens
    ],
)
@pytest.mark.parametrize("activate", [False, True])
def test_what_is_in_the_cache_need_not_come_but_for_the_last_position(backend, names, known, asked, cached, activate):
    engine = warm_engine(backend)
    before = engine.pool.counts()
    room = reserved(engine, known, names[:asked])
    assert room.cached_tokens == cached == len(room.shared.blocks) * BLOCK
    assert len(room.blocks) == engine.layout.blocks_for(known + 1)
    counts = engine.pool.counts()
    assert (counts.reserved, counts.owned) == (len(room.blocks) - cached // BLOCK, cached // BLOCK)
    assert room.blocks == [*engine.pool.find(names[: cached // BLOCK]), *room.own.blocks]
    if activate:
        blocks, whole = room.blocks, room.activate()
        assert (whole.blocks, whole.state) == (blocks, BlockState.OWNED)
        assert (engine.pool.counts().reserved, engine.pool.counts().owned) == (0, len(blocks))
        whole.release()
    room.release()
    room.release()
    assert (engine.pool.counts().cached, engine.pool.available) == (before.cached, before.available)


def test_only_an_unbroken_beginning_of_the_same_scope_is_found(backend, names):
    engine, foreign = warm_engine(backend), block_names(backend, tuple(PROMPT.encode()), "another")
    for prefix, cached in ((names, 24), ([names[0], b"?" * 32, names[2]], 4), ([b""], 0), (foreign, 0)):
        room = reserved(engine, 26, prefix)
        assert room.cached_tokens == cached
        room.release()
    assert reserved(engine_of(backend, prefix_cache=False), 26, names).cached_tokens == 0


def test_shared_blocks_are_pinned_until_they_are_let_go(backend, names):
    engine = warm_engine(backend, total_blocks=12)
    room = reserved(engine, 9, names)
    pinned = list(room.shared.blocks)
    rest = engine.pool.allocate(engine.pool.available)
    assert not set(pinned) & set(rest.blocks)
    assert engine.pool.find(names) == pinned
    before = engine.pool.counts()
    assert engine.reserve(9, names) is None, "two that are shared, and no room for one more"
    assert engine.pool.counts() == before
    assert engine.pool.counts().owned == 12 - len(room.own.blocks)
    room.release()
    assert engine.pool.find(names) == pinned
    engine.pool.allocate(engine.pool.available)
    assert engine.pool.find(names) == []


@pytest.mark.parametrize(("length", "cached"), [(26, 24), (24, 20), (25, 24), (7, 4), (3, 0)])
def test_the_tokens_are_the_same_whatever_was_cached(backend, names, length, cached):
    """The oracle's logits depend on every byte of KV, so a wrong block would show."""
    receiver, spec = engine_of(backend), spec_of(PROMPT[:length])
    for wanted in (0, cached):
        assert handed_over(backend, receiver, spec, names[: length // BLOCK]) == (backend.expected(spec), wanted)
        assert receiver.pool.available == receiver.pool.total
    assert receiver.counters.prefill_tokens == 0
    assert receiver.pool.find(names) != [] or length < BLOCK
