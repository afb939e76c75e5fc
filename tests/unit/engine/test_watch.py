"""The engine's notifications to readers of its KV, and requests that change their ids."""

import pytest
import torch

from tests.support.engines import Faulty, Streams, engine_of, key_of, spec_of


class Watcher:
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
    engine.submit(key_of("a"), spec_of((1,) * 12), hold=True)
    engine.submit(key_of("b"), spec_of((2,) * 3), hold=True)
    Streams().drain(engine)
    chunks = [[("a", 0, 8)], [("a", 8, 12), ("b", 0, 3)]]
    assert watcher.layers == [(key, layer, *span) for chunk in chunks for layer in range(2) for key, *span in chunk]


def test_kv_of_a_layer_is_written_when_it_is_told(backend):
    engine, key, early = engine_of(backend), key_of(), list[torch.Tensor]()
    wire = torch.empty(9 * engine.layout.layer_token_bytes, dtype=torch.uint8)

    def read(blocks, layer):
        engine.kv.gather(range(layer, layer + 1), blocks, 0, 9, wire)
        return wire.clone()

    engine.watch(lambda work, layer: early.append(read(work[0].sequence.allocation.blocks, layer)), lambda _: None)
    engine.submit(key, spec_of(range(9)), hold=True)
    engine.step()
    assert len(early) == 2
    assert all(torch.equal(found, read(engine.held(key).blocks, layer)) for layer, found in enumerate(early))


def test_who_reads_blocks_is_told_before_release_preemption_or_a_failure_lets_them_go(backend):
    engine = engine_of(backend)
    watcher = Watcher(engine)
    for name, steps in (("waits", 0), ("runs", 1), ("held", 1)):
        engine.submit(key := key_of(name), spec_of((1,) * 9), hold=name == "held")
        for _ in range(steps):
            engine.step()
        engine.release(key)
        engine.release(key)
    assert watcher.freed == ["runs", "held"]
    engine = engine_of(backend, total_blocks=8)
    watcher = Watcher(engine)
    for name, priority in (("low", 0), ("high", 1)):
        engine.submit(key_of(name), spec_of((1, *name.encode()) * 3, max_tokens=20, priority=priority))
        engine.step()
    while "low" not in watcher.freed:
        engine.step()
    assert engine.counters.preemptions > 0
    engine = engine_of(Faulty("raise"))
    watcher = Watcher(engine)
    engine.submit(key_of(), spec_of((1,) * 9))
    assert len(engine.step().failed) == 1
    assert watcher.freed == ["r"]


@pytest.mark.parametrize("state", ["waiting", "running", "held"])
def test_a_request_goes_on_under_another_name(backend, state):
    engine, spec = engine_of(backend, max_batched_tokens=4), spec_of("The quick brown fox")
    old, new = key_of(), key_of(attempt=2)
    engine.submit(old, spec, hold=state == "held")
    for _ in range({"waiting": 0, "running": 2, "held": 5}[state]):
        engine.step()
    computed = engine.counters.prefill_tokens
    engine.rename(old, new)
    with pytest.raises(KeyError):
        engine.rename(old, key_of(attempt=3))
    if state == "held":
        assert len(engine.held(new)) == 5
        assert (engine.counters.prefill_tokens, engine.has_work()) == (len(spec), False)
        with pytest.raises(KeyError):
            engine.held(old)
    else:
        found = Streams().drain(engine)
        assert (list(found.tokens), found.ids(new)) == ([new], backend.expected(spec))
        assert engine.counters.prefill_tokens == len(spec) >= computed
    engine.release(old)  # the old id is unknown now
    engine.release(new)
    assert engine.pool.available == 40


def test_a_name_that_is_taken_or_unknown_is_refused(backend):
    engine = engine_of(backend)
    keys = [key_of(name) for name in "abc"]
    for key in keys[:2]:
        engine.submit(key, spec_of((1,) * 9))
    with pytest.raises(ValueError, match="already in use"):
        engine.rename(keys[0], keys[1])
    with pytest.raises(KeyError):
        engine.rename(keys[2], key_of("d"))
    assert set(Streams().drain(engine).tokens) == set(keys[:2])
