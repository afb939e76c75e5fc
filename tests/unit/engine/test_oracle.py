import pytest
import torch

from baton.core import FinishReason, HandoffId, KVLayout, Sampling, SequenceSpec
from baton.engine.engine import Engine
from baton.engine.generate import generate
from baton.engine.inputs import Inputs
from baton.engine.oracle import OracleBackend, oracle_layout
from baton.engine.sequence import Sequence, Work
from baton.errors import ConfigError
from baton.tokenizer import ORACLE_EOS, OracleTokenizer

PROMPT = tuple(b"a prompt of some length")
LONG = Sampling(max_tokens=24, ignore_eos=True, seed=3)


def reserved(engine, tokens):
    reservation = engine.reserve(tokens)
    assert reservation is not None
    return reservation


def wire_of(layout, tokens):
    return torch.empty(layout.layers * tokens * layout.layer_token_bytes, dtype=torch.uint8)


def handed_over(backend, spec, damage=None):
    """Prefill on one engine, copy its KV into another, damage it, decode there. Returns all output tokens."""
    sender, receiver = (Engine(backend, OracleTokenizer(), total_blocks=40) for _ in range(2))
    other = reserved(receiver, 40)  # so that the block numbers of the two differ
    key = HandoffId("r", 1)
    sender.submit(key, spec, hold=True)
    while not (outputs := sender.step().outputs):
        pass
    first = outputs[0].tokens
    blocks = sender.held(key).blocks
    room = reserved(receiver, len(spec))
    layers = range(backend.layout.layers)
    wire = wire_of(backend.layout, len(spec))
    sender.kv.gather(layers, blocks, 0, len(spec), wire)
    if damage is not None:
        damage(wire)
    receiver.kv.scatter(layers, room.blocks, 0, len(spec), wire)
    known = SequenceSpec(spec.prompt, spec.sampling, (*spec.known, *(t.token_id for t in first)))
    receiver.adopt(key, known, room)
    tokens = list(first)
    while receiver.has_work():
        for output in receiver.step().outputs:
            tokens += output.tokens
    sender.release(key)
    other.release()
    for engine in (sender, receiver):
        assert engine.pool.available == 40
    assert (sender.counters.decode_steps, sender.counters.prefill_tokens) == (0, len(spec))
    assert (receiver.counters.prefill_tokens, receiver.counters.decode_tokens) == (0, len(tokens) - len(first))
    return tokens


def test_handed_over_equals_single_and_expected():
    backend = OracleBackend()
    spec = SequenceSpec(PROMPT, LONG)
    single = generate(Engine(backend, OracleTokenizer(), total_blocks=9), spec)
    assert handed_over(backend, spec) == single.tokens
    assert [t.token_id for t in single.tokens] == backend.expected(spec)


def test_each_kind_of_wrong_block_changes_the_tokens():
    backend = OracleBackend(oracle_layout(block_size=4))
    spec = SequenceSpec(PROMPT, LONG)
    right = backend.expected(spec)
    size = backend.layout.layer_block_bytes // 2
    rng = torch.Generator().manual_seed(1)

    def zero(wire):
        wire[size : 2 * size] = 0

    def swap(wire):
        wire[: 2 * size] = wire[: 2 * size].view(2, size).flip(0).flatten()

    def shift_layers(wire):
        wire.copy_(wire.view(backend.layout.layers, -1).roll(1, 0).flatten())

    def foreign(wire):
        wire[:size] = torch.randint(256, (size,), dtype=torch.uint8, generator=rng)

    for damage in (zero, swap, shift_layers, foreign):
        found = [t.token_id for t in handed_over(backend, spec, damage)]
        assert found[0] == right[0], "the sender computed this one"
        assert found[1:6] != right[1:6], damage.__name__


def test_every_flipped_byte_changes_the_logits():
    backend = OracleBackend(oracle_layout(block_size=4))
    engine = Engine(backend, OracleTokenizer(), total_blocks=4)
    tokens = 6
    spec = SequenceSpec(tuple(b"abcdef"), LONG)
    engine.submit(key := HandoffId("r", 1), spec, hold=True)
    first = engine.step().outputs[0].tokens[0].token_id
    blocks, layers = engine.held(key).blocks, range(backend.layout.layers)
    wire = wire_of(backend.layout, tokens)
    engine.kv.gather(layers, blocks, 0, tokens, wire)
    known = SequenceSpec(spec.prompt, LONG, (first,))

    def next_logits(data):
        room = reserved(engine, tokens)
        engine.kv.scatter(layers, room.blocks, 0, tokens, data)
        position = Sequence(HandoffId("d", 1), 1, len(known), tokens, tokens, room.own)
        batch = Inputs(backend, 1, 1, 4).build([Work(position, 1)], [list(known.tokens)])
        logits = backend.forward(batch, engine.kv)
        room.release()
        return logits

    clean = next_logits(wire)
    assert len(wire) == 2 * 2 * 6 * 32
    for place in range(len(wire)):
        wire[place] ^= 1 << place % 8
        assert not torch.equal(next_logits(wire), clean), f"byte {place} is not looked at"
        wire[place] ^= 1 << place % 8
    assert torch.equal(next_logits(wire), clean)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tensors", [("k", "v"), ("latent",)])
def test_any_layout_of_whole_words(dtype, tensors):
    backend = OracleBackend(KVLayout(layers=3, kv_heads=1, head_dim=8, block_size=5, dtype=dtype, tensors=tensors))
    spec = SequenceSpec(PROMPT, LONG)
    assert [t.token_id for t in handed_over(backend, spec)] == backend.expected(spec)


def test_other_layout_is_refused():
    with pytest.raises(ConfigError, match="8-byte words"):
        OracleBackend(KVLayout(layers=1, kv_heads=1, head_dim=1, block_size=4, dtype="float32"))


def test_seed_and_layout_make_the_model():
    same, again, seed, layout = (
        OracleBackend(),
        OracleBackend(),
        OracleBackend(seed=1),
        OracleBackend(oracle_layout(block_size=8)),
    )
    assert same.fingerprint == again.fingerprint
    assert seed.fingerprint != same.fingerprint
    assert layout.fingerprint == same.fingerprint, "the size of a block is each worker's own"
    spec = SequenceSpec(PROMPT, LONG)
    assert same.expected(spec) == layout.expected(spec) != seed.expected(spec)


def test_streams_end_by_themselves_and_sampling_is_not_trivial():
    backend = OracleBackend()
    lengths, firsts = [], set()
    for seed in range(30):
        sampling = Sampling(max_tokens=300, seed=seed, top_k=8)
        found = backend.expected(SequenceSpec(PROMPT, sampling))
        assert ORACLE_EOS not in found
        lengths.append(len(found))
        firsts.add(found[0] if found else ORACLE_EOS)
    assert sum(length < 300 for length in lengths) >= 15
    assert len(firsts) >= 4


def test_expected_continues_from_known_tokens():
    backend = OracleBackend()
    whole = backend.expected(SequenceSpec(PROMPT, LONG))
    rest = backend.expected(SequenceSpec(PROMPT, LONG, tuple(whole[:9])), 5)
    assert rest == whole[9:14]


def test_generate_tells_how_it_ended():
    engine = Engine(OracleBackend(), OracleTokenizer(), total_blocks=20)
    generation = generate(engine, SequenceSpec(PROMPT, Sampling(max_tokens=3, ignore_eos=True)))
    assert generation.finish.reason is FinishReason.LENGTH
    assert [t.index for t in generation.tokens] == [0, 1, 2]
