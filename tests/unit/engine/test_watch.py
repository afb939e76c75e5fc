"""What the engine tells those who read KV while it computes, and requests that change their names."""

import pytest
import torch

from baton.core import HandoffId, Sampling, SequenceSpec
from baton.engine.engine import Engine
from baton.engine.oracle import OracleBackend, oracle_layout
from baton.tokenizer import OracleTokenizer

BLOCK = 4


@pytest.fixture
def backend():
    return OracleBackend(oracle_layout(block_size=BLOCK), max_model_len=128)


def engine_of(backend, total_blocks=40, **options):
    return Engine(backend, OracleTokenizer(), total_blocks=total_blocks, **options)


def tokens_by_key(engine):
    """Step until nothing is left to do."""
    streams = dict[HandoffId, list[int]]()
    while engine.has_work():
        result = engine.step()
        assert not result.failed
        for output in result.outputs:
            streams.setdefault(output.key, []).extend(token.token_id for token in output.tokens)
    return streams


class Watcher:
    """Remembers what the engine says in the middle of its steps."""

    def __init__(self, engine):
        self.layers, self.freed = [], []
        engine.watch(self.on_layer, self.on_free)

    def on_layer(self, work, layer):
        for item in work:
            before = item.sequence.computed
            self.layers.append((item.sequence.key.request_id, layer, before, before + item.count))

    def on_free(self, sequence):
        assert sequence.allocation.blocks, "its blocks are here still"
        self.freed.append(sequence.key.request_id)


def test_each_layer_of_each_chunk_is_told_in_order_and_before_the_step_counts(backend):
    engine = engine_of(backend, max_batched_tokens=8)
    watcher = Watcher(engine)
    engine.submit(HandoffId("a", 1), SequenceSpec((1,) * 12, Sampling(ignore_eos=True)), hold=True)
    engine.submit(HandoffId("b", 1), SequenceSpec((2,) * 3, Sampling(ignore_eos=True)), hold=True)
    while engine.has_work():
        engine.step()
    chunks = [[("a", 0, 8)], [("a", 8, 12), ("b", 0, 3)]]
    assert watcher.layers == [(key, layer, *span) for chunk in chunks for layer in range(2) for key, *span in chunk]


def test_kv_of_a_layer_is_written_when_it_is_told(backend):
    """Read at that very moment, it is what it is in the end."""
    engine, key, early = engine_of(backend), HandoffId("r", 1), list[torch.Tensor]()
    wire = torch.empty(9 * engine.layout.layer_token_bytes, dtype=torch.uint8)

    def read(blocks, layer):
        engine.kv.gather(range(layer, layer + 1), blocks, 0, 9, wire)
        return wire.clone()

    engine.watch(lambda work, layer: early.append(read(work[0].sequence.allocation.blocks, layer)), lambda _: None)
    engine.submit(key, SequenceSpec(tuple(range(9)), Sampling(ignore_eos=True)), hold=True)
    engine.step()
    assert len(early) == 2
    assert all(torch.equal(found, read(engine.held(key).blocks, layer)) for layer, found in enumerate(early))


def test_who_reads_blocks_is_told_before_they_are_let_go_by_release(backend):
    engine = engine_of(backend)
    watcher = Watcher(engine)
    for number, steps in enumerate((0, 1)):  # one that waits and has no blocks, one that runs
        engine.submit(key := HandoffId(str(number), 1), SequenceSpec((1,) * 9, Sampling(ignore_eos=True)))
        for _ in range(steps):
            engine.step()
        engine.release(key)
    engine.submit(key := HandoffId("held", 1), SequenceSpec((1,) * 9, Sampling(ignore_eos=True)), hold=True)
    engine.step()
    engine.release(key)
    engine.release(key)
    assert watcher.freed == ["1", "held"]


def test_who_reads_blocks_is_told_before_they_are_let_go_by_preemption(backend):
    engine = engine_of(backend, total_blocks=8)
    watcher = Watcher(engine)
    for name, priority in (("low", 0), ("high", 1)):
        spec = SequenceSpec((1, *name.encode()) * 3, Sampling(max_tokens=20, ignore_eos=True), priority=priority)
        engine.submit(HandoffId(name, 1), spec)
        engine.step()
    while "low" not in watcher.freed:
        engine.step()
    assert engine.counters.preemptions > 0
    while engine.has_work():
        assert not engine.step().failed


def test_who_reads_blocks_is_told_before_they_are_let_go_by_a_failure(backend, monkeypatch):
    engine = engine_of(backend)
    watcher = Watcher(engine)
    monkeypatch.setattr(engine.backend, "forward", lambda batch, kv: 1 / 0)
    engine.submit(HandoffId("r", 1), SequenceSpec((1,) * 9, Sampling()))
    assert len(engine.step().failed) == 1
    assert watcher.freed == ["r"]


# --- another name


@pytest.mark.parametrize("state", ["waiting", "running", "held"])
def test_a_request_goes_on_under_another_name(backend, state):
    engine = engine_of(backend, max_batched_tokens=4)
    spec = SequenceSpec(tuple(b"The quick brown fox"), Sampling(max_tokens=9, temperature=0.0, ignore_eos=True))
    old, new = HandoffId("r", 1), HandoffId("r", 2)
    engine.submit(old, spec, hold=state == "held")
    for _ in range({"waiting": 0, "running": 2, "held": 5}[state]):
        engine.step()
    computed = engine.counters.prefill_tokens
    engine.rename(old, new)
    with pytest.raises(KeyError):
        engine.rename(old, HandoffId("r", 3))
    if state == "held":
        assert len(engine.held(new)) == 5
        assert (engine.counters.prefill_tokens, engine.has_work()) == (len(spec), False)
        with pytest.raises(KeyError):
            engine.held(old)
    else:
        assert tokens_by_key(engine) == {new: backend.expected(spec)}
        assert engine.counters.prefill_tokens == len(spec) >= computed
    engine.release(old)  # nobody's name any more
    engine.release(new)
    assert engine.pool.available == 40


def test_a_name_that_is_taken_or_unknown_is_refused(backend):
    engine = engine_of(backend)
    keys = [HandoffId(name, 1) for name in "abc"]
    for key in keys[:2]:
        engine.submit(key, SequenceSpec((1,) * 9, Sampling(max_tokens=3, ignore_eos=True)))
    with pytest.raises(ValueError, match="already here"):
        engine.rename(keys[0], keys[1])
    with pytest.raises(KeyError):
        engine.rename(keys[2], HandoffId("d", 1))
    assert set(tokens_by_key(engine)) == set(keys[:2])
