import pytest
import torch

from baton.core import KVLayout
from baton.engine.model_runner import Inputs
from baton.engine.oracle import OracleBackend, oracle_layout
from baton.engine.sequence import ScheduledSequence, Sequence
from baton.errors import ConfigError
from baton.worker.engine_factory import generate
from tests.support import engines
from tests.support.engines import engine_of, hand_over, ids, key_of, kv_of, oracle, reserved


def spec_of(prompt="a prompt of some length", **options):
    return engines.spec_of(prompt, **{"max_tokens": 24, "temperature": 1.0, "seed": 3} | options)


def test_every_flipped_byte_changes_the_logits():
    backend = oracle()
    engine, tokens, spec = engine_of(backend, 4), 6, spec_of("abcdef")
    streams, wire = kv_of(engine, spec)
    known, layers = [*spec.prompt, *streams.ids(key_of())], range(backend.layout.layers)

    def next_logits(data):
        room = reserved(engine, tokens)
        engine.kv.scatter(layers, room.blocks, 0, tokens, data)
        position = Sequence(key_of("d"), 1, len(known), tokens, tokens, room.own)
        logits = backend.forward(Inputs(backend, 1, 1, 4).build([ScheduledSequence(position, 1)], [known]), engine.kv)
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
def test_a_handoff_in_any_layout_of_whole_words_gives_the_tokens_of_one_engine(dtype, tensors):
    """Another reservation makes the receiver write the KV into blocks with other numbers."""
    backend = OracleBackend(KVLayout(layers=3, kv_heads=1, head_dim=8, block_size=5, dtype=dtype, tensors=tensors))
    sender, receiver = engine_of(backend), engine_of(backend)
    other = reserved(receiver, 40)
    tokens = hand_over(sender, receiver, spec_of()).ids(key_of())
    other.release()
    assert tokens == ids(generate(engine_of(backend, 10), spec_of()).tokens) == backend.expected(spec_of())
    assert sender.pool.available == receiver.pool.available == 40
    assert (sender.counters.decode_steps, sender.counters.prefill_tokens) == (0, len(spec_of()))
    assert (receiver.counters.prefill_tokens, receiver.counters.decode_tokens) == (0, len(tokens) - 1)


def test_other_layout_is_refused():
    with pytest.raises(ConfigError, match="8-byte words"):
        OracleBackend(KVLayout(layers=1, kv_heads=1, head_dim=1, block_size=4, dtype="float32"))


def test_seed_and_layout_make_the_model():
    same, again, seed = OracleBackend(), OracleBackend(), OracleBackend(seed=1)
    layout = OracleBackend(oracle_layout(block_size=8))
    assert same.fingerprint == again.fingerprint != seed.fingerprint
    assert layout.fingerprint == same.fingerprint, "the size of a block is each worker's own"
    assert same.expected(spec_of()) == layout.expected(spec_of()) != seed.expected(spec_of())
