"""Cached blocks: their names, the prompts that use them, and reservations that share them for KV of another worker."""

from dataclasses import replace

import pytest
import torch

from baton.core import Sampling, SequenceSpec
from baton.engine.block_pool import BlockPool, BlockState
from baton.engine.prefix_cache import BlockHashChain, block_hashes_of, hashable_blocks, scope_key
from baton.worker.engine_factory import generate
from tests.support import engines
from tests.support.engines import BLOCK, Faulty, Streams, block_names, engine_of, ids, key_of, oracle, reserved, spec_of


def tokens_of(engine, prompt, **options):
    before = engine.counters.cached_tokens
    found = generate(engine, spec_of(prompt, **options))
    return ids(found.tokens), engine.counters.cached_tokens - before


def names_in(scope, tokens, size=BLOCK):
    return engines.block_names(oracle(), tokens, scope, size)


def test_a_name_says_all_tokens_up_to_its_end_in_its_scope():
    tokens = list(range(12))
    one = names_in("", tokens)
    assert names_in("", list(range(12))) == one
    assert len(set(one)) == 3
    for changed in range(12):
        other = names_in("", [*tokens[:changed], 99, *tokens[changed + 1 :]])
        assert [a == b for a, b in zip(one, other, strict=True)] == [i < changed // BLOCK for i in range(3)]
    assert not set(one) & set(names_in("me", tokens))
    assert not set(one) & set(names_in("", tokens, 2)) | set(names_in("", tokens)) & set(names_in("", tokens, 6))
    assert scope_key("a", "bc") != scope_key("ab", "c")
    assert scope_key("a", "b", True) != scope_key("a", "b") == scope_key("a", "b", False)
    assert scope_key("a", "b", True) != scope_key("a", "bdeterministic")
    assert len(set(names_in("", [7] * 40))) == 10


def test_a_chain_grows_with_its_tokens_and_never_names_half_a_block():
    tokens = [1, 2, 3, 4, 5]
    chain = BlockHashChain(scope_key(oracle().fingerprint, ""), tokens, BLOCK)
    with pytest.raises(IndexError, match="block 1 is not full: 1 of 4"):
        chain.digest(1)
    tokens += [6, 7, 8]
    assert [chain.digest(1), chain.digest(0)] == names_in("", [1, 2, 3, 4, 5, 6, 7, 8])[::-1]
    tokens += [9, 10, 11, 12]
    assert chain.digests(1, 3) == [chain.digest(1), chain.digest(2)]


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (30, 28)])
def test_the_same_prompt_again_computes_the_rest_and_at_least_one_token(backend, length, hit):
    engine, prompt = engine_of(backend), "The quick brown fox jumps over the lazy dog"[:length]
    right = backend.expected(spec_of(prompt))
    assert tokens_of(engine, prompt) == (right, 0)
    computed = engine.counters.prefill_tokens
    assert tokens_of(engine, prompt) == (right, hit)
    assert engine.counters.prefill_tokens == computed + length - hit


def test_what_decode_filled_is_found_by_the_next_turn(backend):
    engine, prompt = engine_of(backend), tuple(b"hello you")
    follow_up = (*prompt, *tokens_of(engine, prompt)[0], *b"?")
    # 9 + 9 tokens, but the last one was never an input
    assert tokens_of(engine, follow_up) == (backend.expected(spec_of(follow_up)), 16)


def test_adopted_blocks_are_found_only_once_they_are_adopted(backend):
    receiver, spec = engine_of(backend), spec_of("what is the largest ocean?")
    room = engines.reserved(receiver, len(spec))
    streams, kv = engines.kv_of(engine_of(backend), spec)
    receiver.kv.scatter(range(2), room.blocks, 0, len(spec), kv)
    assert tokens_of(receiver, spec.prompt)[1] == 0, "reserved blocks may still be written by a peer"
    receiver.pool.allocate(receiver.pool.available, reserved=True).release()  # evicts the released blocks
    receiver.adopt(key_of(), replace(spec, known=tuple(streams.ids(key_of()))), room)
    receiver.release(key_of())
    assert tokens_of(receiver, spec.prompt) == (backend.expected(spec), 24)


def test_another_scope_finds_nothing(backend):
    engine, prompt = engine_of(backend), "a secret prompt of one tenant"
    tokens, _ = tokens_of(engine, prompt, cache_scope="one")
    for scope, hit in (("two", 0), ("", 0), ("one", 28), ("two", 28)):
        assert tokens_of(engine, prompt, cache_scope=scope) == (tokens, hit)


def test_without_the_cache_blocks_are_free_at_once(backend):
    engine, prompt = engine_of(backend, prefix_cache=False), "The quick brown fox"
    assert tokens_of(engine, prompt) == tokens_of(engine, prompt)
    assert engine.counters.cached_tokens == 0
    assert engine.pool.counts().free == 40


def test_what_runs_shares_its_blocks_and_outputs_tell_what_was_cached(backend):
    engine, cached, found = engine_of(backend), dict[str, int](), Streams()
    specs = {key_of(i): spec_of((*b"one beginning for all of them: ", i)) for i in range(4)}
    for i, (key, spec) in enumerate(specs.items()):
        engine.submit(key, spec)
        if i == 0:
            found.step(engine)
    shared = engine.pool.counts().owned

    def look(result):
        cached.update({output.key.request_id: output.cached_tokens for output in result.outputs})
        assert engine.pool.counts().owned <= shared + 4 + 3 * 3, "the seven blocks of the beginning are counted once"

    found.drain(engine, look)
    assert cached == {"0": 0, "1": 28, "2": 28, "3": 28}
    assert all(found.ids(key) == backend.expected(spec) for key, spec in specs.items())
    assert engine.load().cached_tokens == 3 * 28


@pytest.mark.parametrize("fault", ["raise", "nan"])
def test_what_a_failed_step_wrote_or_read_is_not_found(fault):
    backend = Faulty()
    engine, prompt = engine_of(backend), tuple(b"The quick brown fox")
    tokens_of(engine, prompt)
    backend.fault = fault
    engine.submit(key_of(), spec_of((*prompt, *b" jumps")))
    assert len(engine.step().failed) == 1
    backend.fault = ""
    assert engine.counters.cached_tokens == 16
    assert tokens_of(engine, prompt) == (backend.expected(spec_of(prompt)), 0)


@pytest.mark.parametrize(
    ("prompt", "known", "ordinary", "deterministic"),
    [(1, 0, 0, 0), (8, 0, 1, 1), (9, 0, 2, 2), (8, 1, 2, 2), (8, 9, 4, 2), (7, 9, 3, 1), (3, 9, 2, 0)],
)
def test_blocks_of_output_tokens_have_no_names_if_bits_or_thoughts_count(prompt, known, ordinary, deterministic):
    spec = SequenceSpec(tuple(range(prompt)), Sampling(), tuple(range(known)))
    exact = replace(spec, deterministic=True, cache_scope="b")
    assert (hashable_blocks(spec, 4), hashable_blocks(spec, 4, thinks=True)) == (ordinary, deterministic)
    assert hashable_blocks(replace(spec, think_while_decoding=True), 4, thinks=True) == ordinary
    chain = BlockHashChain(scope_key("a", "b", True), spec.tokens, 4)
    for thinks in (True, False):
        assert hashable_blocks(exact, 4, thinks=thinks) == deterministic
        assert list(block_hashes_of(exact, "a", 4, thinks=thinks)) == [chain.digest(i) for i in range(deterministic)]


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
