"""Room for KV that comes from elsewhere: what is here is shared, never written, and all of it is given back."""

import random

import pytest
import torch

from baton.core import HandoffId, Sampling, SequenceSpec
from baton.engine.blocks import BlockPool, BlockState
from baton.engine.engine import Engine
from baton.engine.generate import generate
from baton.engine.oracle import OracleBackend, oracle_layout
from baton.engine.prefix import Chain, scope_key
from baton.engine.reservation import Reservation
from baton.tokenizer import OracleTokenizer

BLOCK = 4
GREEDY = Sampling(max_tokens=9, temperature=0.0, ignore_eos=True)
KEY = HandoffId("r", 1)
PROMPT = tuple(b"what is the largest ocean?")  # 26 tokens: 6 full blocks


@pytest.fixture(scope="module")
def backend():
    return OracleBackend(oracle_layout(block_size=BLOCK), max_model_len=128)


def engine_of(backend, total_blocks=40, **options):
    return Engine(backend, OracleTokenizer(), total_blocks=total_blocks, **options)


def names_of(backend, tokens, scope=""):
    chain = Chain(scope_key(backend.fingerprint, scope), tokens, BLOCK)
    return [chain.digest(block) for block in range(len(tokens) // BLOCK)]


def kv_of(backend, spec, begin):
    """The first token of `spec`, and its KV of the positions from `begin` on, as a prefill worker has them."""
    sender = engine_of(backend)
    sender.submit(KEY, spec, hold=True)
    first = sender.step().outputs[0].tokens[0].token_id
    count = len(spec) - begin
    wire = torch.empty(sender.layout.layers * count * sender.layout.layer_token_bytes, dtype=torch.uint8)
    sender.kv.gather(range(sender.layout.layers), sender.held(KEY).blocks, begin, len(spec), wire)
    return first, wire


def hand_over(backend, receiver, spec, prefix):
    """Reserve with `prefix`, receive the rest, adopt, decode to the end: the tokens, and how many needed not come."""
    room = receiver.reserve(len(spec), prefix)
    first, wire = kv_of(backend, spec, room.cached_tokens)
    shared = [receiver.kv.k[:, block].view(torch.int32).clone() for block in room.shared.blocks]
    receiver.kv.scatter(range(receiver.layout.layers), room.blocks, room.cached_tokens, len(spec), wire)
    receiver.adopt(KEY, SequenceSpec(spec.prompt, spec.sampling, (first,)), room)
    owned = receiver._requests[KEY].sequence.allocation.blocks[: len(shared)]
    tokens = [first]
    while receiver.has_work():
        for output in receiver.step().outputs:
            tokens += [token.token_id for token in output.tokens]
    for block, before in zip(owned, shared, strict=True):
        assert torch.equal(receiver.kv.k[:, block].view(torch.int32), before), "a shared block was written"
    return tokens, room.cached_tokens


# --- Allocation.prepend, Reservation


def taken_from(pool, n, **options):
    allocation = pool.allocate(n, **options)
    assert allocation is not None
    return allocation


def owned(pool, n, name=b""):
    """`n` owned blocks, published one by one as `name` and a number if there is a name."""
    allocation = taken_from(pool, n)
    if name:
        allocation.publish(0, [name + bytes([i]) for i in range(n)])
    return allocation


def found(pool, n, name=b"a"):
    return pool.find([name + bytes([i]) for i in range(n)])


def test_prepended_blocks_are_the_others_from_then_on():
    pool = BlockPool(8)
    owned(pool, 3, b"a").release()
    head, own = taken_from(pool, 0, shared=found(pool, 2)), owned(pool, 2)
    blocks, generations = head.blocks + own.blocks, head.generations + own.generations
    own.prepend(head)
    assert (own.blocks, own.generations) == (blocks, generations)
    assert (head.blocks, head.generations, head.state) == ([], [], BlockState.RELEASED)
    head.release()  # it holds nothing any more
    assert (pool.counts().owned, pool.counts().cached) == (4, 1)
    own.release()
    assert (pool.counts().owned, pool.counts().cached, pool.counts().free) == (0, 3, 5)
    assert found(pool, 3) == blocks[:2] + found(pool, 3)[2:]


@pytest.mark.parametrize("which", ["head", "own"])
@pytest.mark.parametrize("state", [BlockState.RESERVED, BlockState.QUARANTINED, BlockState.RELEASED])
def test_only_owned_blocks_are_prepended_and_to_owned_ones(which, state):
    pool = BlockPool(8)
    parts = {"head": owned(pool, 2), "own": owned(pool, 2)}
    odd = parts[which] = taken_from(pool, 2, reserved=state is BlockState.RESERVED)
    if state is BlockState.QUARANTINED:
        odd.quarantine()
    if state is BlockState.RELEASED:
        odd.release()
    before = [(part.blocks, part.state) for part in parts.values()]
    with pytest.raises(ValueError, match=state.value):
        parts["own"].prepend(parts["head"])
    assert [(part.blocks, part.state) for part in parts.values()] == before


@pytest.mark.parametrize("cached", [0, 2])
def test_a_reservation_is_given_back_or_becomes_one_allocation(cached):
    pool = BlockPool(8)
    owned(pool, 2, b"a").release()
    for activate in (False, True):
        shared = taken_from(pool, 0, shared=found(pool, cached))
        room = Reservation(shared, taken_from(pool, 3, reserved=True), cached * BLOCK)
        blocks = room.blocks
        assert blocks == [*found(pool, cached), *room.own.blocks]
        assert (pool.counts().reserved, pool.counts().owned) == (3, cached)
        if activate:
            whole = room.activate()
            assert (whole.blocks, whole.state) == (blocks, BlockState.OWNED)
            assert (pool.counts().reserved, pool.counts().owned) == (0, 3 + cached)
            whole.release()
        room.release()
        room.release()
        assert (pool.counts().reserved, pool.counts().owned, pool.counts().cached) == (0, 0, 2)


# --- Engine.reserve(prefix)


@pytest.mark.parametrize(
    ("known", "asked", "cached"),
    [
        (26, 6, 24),  # six full blocks and two positions more
        (26, 2, 8),  # the router may name less
        (26, 0, 0),
        (24, 6, 20),  # the last position always comes, and with it its block
        (25, 6, 24),
        (4, 1, 0),
        (5, 1, 4),
        (9, 6, 8),  # more names than the known tokens fill
    ],
)
def test_what_is_in_the_cache_need_not_come_but_for_the_last_position(backend, known, asked, cached):
    engine = engine_of(backend)
    generate(engine, SequenceSpec(PROMPT, GREEDY))
    before = engine.pool.counts()
    room = engine.reserve(known, names_of(backend, PROMPT)[:asked])
    assert room.cached_tokens == cached == len(room.shared.blocks) * BLOCK
    assert len(room.blocks) == engine.layout.blocks_for(known + 1)
    counts = engine.pool.counts()
    assert (counts.reserved, counts.owned) == (len(room.blocks) - cached // BLOCK, cached // BLOCK)
    room.release()
    assert (engine.pool.counts().cached, engine.pool.available) == (before.cached, before.available)


def test_only_an_unbroken_beginning_of_the_same_scope_is_found(backend):
    engine = engine_of(backend)
    generate(engine, SequenceSpec(PROMPT, GREEDY))
    names = names_of(backend, PROMPT)
    foreign = names_of(backend, PROMPT, scope="another")
    for prefix, cached in ((names, 24), ([names[0], b"?" * 32, names[2]], 4), ([b""], 0), (foreign, 0)):
        room = engine.reserve(26, prefix)
        assert room.cached_tokens == cached
        room.release()
    plain = engine_of(backend, prefix_cache=False)
    assert plain.reserve(26, names).cached_tokens == 0


def test_shared_blocks_are_pinned_until_they_are_let_go(backend):
    """The cache gives way to others, but not what a reservation counts on."""
    engine = engine_of(backend, total_blocks=12)
    generate(engine, SequenceSpec(PROMPT, GREEDY))
    names = names_of(backend, PROMPT)
    room = engine.reserve(9, names)
    pinned = list(room.shared.blocks)
    rest = engine.pool.allocate(engine.pool.available)
    assert not set(pinned) & set(rest.blocks)
    assert engine.pool.find(names) == pinned
    assert engine.reserve(9, names) is None, "two that are shared, and no room for one more"
    assert engine.pool.counts().owned == 12 - len(room.own.blocks)
    room.release()
    assert engine.pool.find(names) == pinned
    engine.pool.allocate(engine.pool.available)
    assert engine.pool.find(names) == []


def test_a_reservation_that_finds_no_room_leaves_the_cache_as_it_was(backend):
    engine = engine_of(backend, total_blocks=10)
    generate(engine, SequenceSpec(PROMPT, GREEDY))
    other = engine.reserve(3)
    before = engine.pool.counts()
    assert engine.reserve(40, names_of(backend, PROMPT)) is None
    assert engine.pool.counts() == before
    assert other.own.state is BlockState.RESERVED


# --- Engine.adopt


@pytest.mark.parametrize(("length", "cached"), [(26, 24), (24, 20), (25, 24), (7, 4), (3, 0)])
def test_the_tokens_are_the_same_whatever_was_cached(backend, length, cached):
    """The oracle's logits depend on every byte of KV, so a wrong block would show."""
    receiver, spec = engine_of(backend), SequenceSpec(PROMPT[:length], GREEDY)
    for wanted in (0, cached):
        tokens, found = hand_over(backend, receiver, spec, names_of(backend, spec.prompt))
        assert (tokens, found) == (backend.expected(spec), wanted)
        assert receiver.pool.available == receiver.pool.total
    assert receiver.counters.prefill_tokens == 0
    assert receiver.pool.find(names_of(backend, spec.prompt)) != [] or length < BLOCK


def test_a_longer_prompt_goes_on_behind_what_decoding_has_filled(backend):
    receiver, spec = engine_of(backend), SequenceSpec(PROMPT, GREEDY)
    answer, _ = hand_over(backend, receiver, spec, ())
    follow_up = SequenceSpec((*PROMPT, *answer, *b" and why?"), GREEDY)
    tokens, found = hand_over(backend, receiver, follow_up, names_of(backend, follow_up.prompt))
    assert tokens == backend.expected(follow_up)
    assert found == (len(PROMPT) + len(answer) - 1) // BLOCK * BLOCK


def test_a_reservation_that_is_not_adopted_is_still_the_callers(backend):
    engine = engine_of(backend)
    generate(engine, SequenceSpec(PROMPT, GREEDY))
    room = engine.reserve(26, names_of(backend, PROMPT))
    too_long = SequenceSpec(PROMPT * 2, GREEDY, (65,))
    with pytest.raises(ValueError, match="does not fit"):
        engine.adopt(KEY, too_long, room)
    assert (room.own.state, room.shared.state) == (BlockState.RESERVED, BlockState.OWNED)
    room.release()
    assert engine.pool.available == 40
    assert not engine.has_work()


def test_any_prefix_any_time(backend, seed):
    """Reservations with all kinds of prefixes, adopted or given back in any order: all blocks come back."""
    print("seed", seed)
    rng = random.Random(seed)
    engine, live = engine_of(backend, total_blocks=24), list[tuple[HandoffId, SequenceSpec, Reservation]]()
    stems = [tuple(rng.randrange(250) for _ in range(20)) for _ in range(2)]
    for number in range(300):
        stem = rng.choice(stems)
        spec = SequenceSpec(
            (*stem[: rng.randint(1, 20)], *(rng.randrange(250) for _ in range(rng.randint(0, 3)))), GREEDY
        )
        room = engine.reserve(len(spec), names_of(backend, spec.prompt))
        if room is not None:
            live.append((HandoffId(f"h{number}", 1), spec, room))
        if live and rng.random() < 0.6:
            key, spec, room = live.pop(rng.randrange(len(live)))
            if rng.random() < 0.3:
                room.release()
            else:  # its bytes do not matter here
                engine.adopt(key, SequenceSpec(spec.prompt, GREEDY, (65,)), room)
        for _ in range(rng.randint(0, 2)):
            assert not engine.step().failed
        reserved = sum(len(room.own.blocks) for _, _, room in live)
        assert engine.pool.counts().reserved == reserved
    for _, _, room in live:
        room.release()
    while engine.has_work():
        engine.step()
    assert engine.pool.available == 24
