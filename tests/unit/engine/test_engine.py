"""The engine: requests in company equal their solo runs, rejections, failures, notices to KV readers, changed ids."""

import random
from dataclasses import replace

import pytest
import torch

from baton.core import FinishReason, HandoffId
from baton.engine.block_pool import BlockState, Reservation
from baton.errors import EngineFault, InvalidRequest
from baton.tokenizer import ORACLE_EOS
from baton.worker.engine_factory import generate
from tests.support.engines import Faulty, Streams, engine_of, ids, key_of, numbers, reserved, spec_of


def mixed_spec(rng, stems):
    """Draw a request. Many prompts have common beginnings, in two scopes, and some are equal."""
    stem = rng.choice(stems)
    return spec_of(
        prompt=(*stem[: rng.randint(1, len(stem))], *numbers(rng, rng.choice([0, 0, 1, 9]))),
        cache_scope=rng.choice(["", "me"]),
        priority=rng.choice([0, 0, 1]),
        max_tokens=(length := rng.randint(1, 40)),
        min_tokens=rng.choice([0, 0, length // 2]),
        temperature=rng.choice([0.0, 0.7, 1.0, 1.5]),
        top_p=rng.choice([1.0, 0.9, 0.5]),
        top_k=rng.choice([0, 0, 5, 40]),
        min_p=rng.choice([0.0, 0.1]),
        seed=rng.getrandbits(64),
        repetition_penalty=rng.choice([1.0, 1.2]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.3]),
        stop=rng.choice([(), ("a",), ("qu", "Zx"), ("e", "t ", "\n")]),
        stop_token_ids=rng.choice([(), (65, 66)]),
        ignore_eos=rng.random() < 0.3,
        logit_bias=rng.choice([(), ((101, 3.0), (120, -100.0))]),
        logprobs=rng.choice([None, None, 0, 3]),
    )


@pytest.fixture(scope="module")
def solo(backend):
    """32 mixed requests with their solo runs, which must equal the oracle's answers."""
    rng = random.Random(20)
    stems = [numbers(rng, rng.randint(5, 21)) for _ in range(4)]
    specs = {key_of(f"r{i}"): mixed_spec(rng, stems) for i in range(32)}
    found = {key: (spec, generate(engine_of(backend), spec)) for key, spec in specs.items()}
    assert all(ids(alone.tokens) == backend.expected(spec) for spec, alone in found.values())
    assert {alone.finish.reason for _, alone in found.values()} == set(FinishReason), "the mix is too tame"
    return found


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("number", range(6))
def test_staggered_arrivals_aborts_and_other_holders(backend, solo, number):
    rng = random.Random(number)
    engine = engine_of(backend, 30, max_batched_tokens=rng.choice([3, 10, 60]), max_running=rng.choice([2, 6, 40]))
    waiting, aborted, foreign, found = list(solo), set[HandoffId](), list[Reservation](), Streams()

    def shake(result=None):
        for key in waiting[: rng.randint(0, 3)]:
            waiting.remove(key)
            engine.submit(key, solo[key][0])
        victim = rng.choice(list(solo))
        if rng.random() < 0.1 and victim not in found.finishes and victim not in waiting:
            engine.release(victim)
            aborted.add(victim)
        if foreign and rng.random() < 0.5:
            foreign.pop().release()
        elif rng.random() < 0.2 and (room := engine.reserve(rng.randint(1, 20))) is not None:
            foreign.append(room)

    while waiting:
        shake()
        found.drain(engine, shake)
    for room in foreign:
        room.release()
    assert engine.pool.available == 30
    assert engine.counters.cached_tokens > 0
    assert set(found.finishes) | aborted == set(solo)
    for key, (_, alone) in solo.items():
        whole = found.tokens[key]
        assert whole == alone.tokens[: len(whole)]
        assert key in aborted or (whole, found.finishes[key]) == (alone.tokens, alone.finish)


@pytest.mark.slow
def test_handed_back_requests_go_on_elsewhere_with_the_same_tokens(backend, solo):
    first, second = engine_of(backend, 24, recompute_preempted=False), engine_of(backend, 400)
    found, handed_back = Streams(), list[HandoffId]()
    for key, (spec, _) in solo.items():
        first.submit(key, spec)
    found.drain(first, lambda result: handed_back.extend(result.preempted))
    assert len(set(handed_back)) == len(handed_back) >= 2
    assert first.pool.available == 24
    first.submit(handed_back[0], solo[handed_back[0]][0])  # no longer in the engine, so it may come back
    for key in handed_back:
        second.submit(key, replace(solo[key][0], known=tuple(found.ids(key))))
    found.drain(second)
    assert all((found.tokens[k], found.finishes[k]) == (alone.tokens, alone.finish) for k, (_, alone) in solo.items())


@pytest.mark.parametrize("adopt", [False, True])
def test_what_known_tokens_have_ended_ends_at_once_without_sampling(backend, adopt):
    engine, key = engine_of(backend), key_of()
    spec = spec_of((1, 2, 3), max_tokens=2, stop=("zz",), known=tuple(b"az"))
    wanted = engine.finish_of(spec)
    assert (wanted.reason, wanted.tail) == (FinishReason.LENGTH, "z")

    def begin():
        return engine.adopt(key, spec, reserved(engine, len(spec))) if adopt else engine.submit(key, spec)

    begin()
    assert engine.has_work()
    with pytest.raises(ValueError, match="already in use"):
        engine.submit(key, spec)
    result = engine.step()
    assert [(o.key, o.tokens, o.finish) for o in result.outputs] == [(key, [], wanted)]
    assert result.computed == 0
    assert not engine.has_work()
    assert engine.pool.available == 40
    begin()
    engine.release(key)
    assert engine.step().outputs == [], "released before its end was output"


@pytest.mark.parametrize(
    ("end", "sampling", "wanted"),
    [
        (ORACLE_EOS, {"ignore_eos": False}, (0, FinishReason.EOS)),
        (65, {"stop_token_ids": (65,)}, (0, FinishReason.STOP_TOKEN)),
        (ORACLE_EOS, {"ignore_eos": False, "min_tokens": 5}, (5, FinishReason.EOS)),
        (ORACLE_EOS, {"max_tokens": 4}, (4, FinishReason.LENGTH)),
    ],
)
def test_end_tokens_are_neither_streamed_nor_counted(backend, end, sampling, wanted):
    found = generate(engine_of(backend), spec_of((1, 2), logit_bias=((end, 100.0),), **sampling))
    assert (len(found.tokens), found.finish.reason) == wanted
    assert found.finish.matched == ("" if wanted[1] is FinishReason.LENGTH else str(end))
    if "max_tokens" in sampling:
        assert (ids(found.tokens), found.text) == ([ORACLE_EOS] * 4, "")


@pytest.mark.parametrize("options", [{"total_blocks": 5}, {"max_model_len": 20}])
def test_ends_at_max_model_len(backend, options):
    engine = engine_of(backend, **options)
    assert engine.max_model_len == 20
    generation = generate(engine, spec_of((1,) * 17, max_tokens=99))
    assert (len(generation.tokens), generation.finish.reason) == (3, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (spec_of(()), "prompt"),
        (spec_of((1,) * 128), "prompt"),
        (spec_of((1,) * 100, known=(1,) * 29), "prompt"),
        (spec_of((1, 257)), "prompt"),
        (spec_of((1, -1)), "prompt"),
        (spec_of((1,), known=(300,)), "prompt"),
        (spec_of((1,), stop_token_ids=(257,)), "sampling.stop_token_ids"),
        (spec_of((1,), logit_bias=((257, 1.0),)), "sampling.logit_bias"),
    ],
)
def test_what_can_never_run_is_refused_by_field(backend, spec, field):
    engine = engine_of(backend)
    with pytest.raises(InvalidRequest) as caught:
        engine.submit(key_of(), spec)
    assert caught.value.violations[0].field == field
    assert not engine.has_work()


def test_reserve_leaves_room_to_grow_and_to_those_who_wait(backend):
    engine = engine_of(backend, total_blocks=6, max_running=1)
    whole = reserved(engine, 23)
    assert len(whole.blocks) == 6
    assert engine.reserve(0) is None
    whole.release()
    assert engine.reserve(24) is None
    engine.submit(key_of("a"), spec_of((1,) * 5))
    engine.step()
    assert engine.reserve(12) is None, "2 are owned, and 1 is to grow into"
    engine.submit(key_of("b"), spec_of((1,) * 5))
    assert engine.reserve(4) is None, "2 more are for the one that waits"
    assert len(reserved(engine, 3).blocks) == 1
    assert engine.load().waiting == engine.load().running == 1


def test_adopt_takes_only_a_fitting_reservation(backend):
    engine, other = engine_of(backend), engine_of(backend)
    spec, key = spec_of((1,) * 9, known=(65,)), key_of()
    used = Reservation(engine.pool.allocate(0), engine.pool.allocate(3), 0)
    for wrong, named in ((engine.reserve(3), "1 blocks"), (other.reserve(9), "of this pool"), (used, "is owned")):
        with pytest.raises(ValueError, match=named):
            engine.adopt(key, spec, wrong)
        wrong.release()
    engine.adopt(key, spec, right := engine.reserve(9))
    assert right.own.state is BlockState.OWNED
    engine.release(key)
    assert engine.pool.available == 40


def test_held_blocks_stay_until_release_also_in_quarantine_and_after_the_only_token(backend):
    engine, key = engine_of(backend), key_of()
    engine.submit(key, spec_of((1,) * 9), hold=True)
    with pytest.raises(KeyError):
        engine.held(key)
    (output,) = engine.step().outputs
    assert (len(output.tokens), output.finish) == (1, None)
    assert not engine.has_work()
    allocation = engine.held(key)
    assert len(allocation) == 3
    allocation.quarantine()
    engine.release(key)
    assert engine.pool.counts().quarantined == 3
    engine.pool.unquarantine(allocation)
    engine.submit(key, spec_of((1, 2), max_tokens=1), hold=True)
    (output,) = engine.step().outputs
    assert (len(output.tokens), output.finish.reason) == (1, FinishReason.LENGTH)
    assert len(engine.held(key)) == 1
    engine.release(key)
    engine.release(key)
    assert engine.pool.available == 40


def test_an_engine_without_room_stalls_until_there_is_some(backend):
    engine = engine_of(backend, total_blocks=4)
    taken = engine.pool.allocate(4, reserved=True)
    engine.submit(key_of(), spec_of((1,), max_tokens=1))
    assert engine.step().computed == 0
    assert engine.has_work()
    with pytest.raises(EngineFault, match="block pool is full"):
        generate(engine, spec_of((1,)))
    taken.release()
    assert engine.step().computed == 1


def test_backend_that_raises_fails_only_its_batch():
    backend = Faulty("raise", ord("\r"))
    engine = engine_of(backend, max_running=2)
    specs = {key_of(prompt): spec_of(prompt) for prompt in ("ab", "a\r", "cd", "ef")}
    for key, spec in specs.items():
        engine.submit(key, spec)
    failed = [(key.request_id, str(fault)) for key, fault in engine.step().failed]
    assert failed == [("ab", "RuntimeError: out of luck"), ("a\r", "RuntimeError: out of luck")]
    found = Streams().drain(engine)
    assert {key.request_id: found.ids(key) for key in found.tokens} == {
        name: backend.expected(spec_of(name)) for name in ("cd", "ef")
    }
    assert engine.pool.available == 40


def test_row_without_numbers_fails_alone():
    engine = engine_of(Faulty("nan", ord("\r")))
    for prompt in ("ab", "a\r"):
        engine.submit(key_of(prompt), spec_of(prompt))
    result = engine.step()
    assert [key.request_id for key, _ in result.failed] == ["a\r"]
    assert [output.key.request_id for output in result.outputs] == ["ab"]
    engine.release(key_of("ab"))
    assert engine.pool.available == 40


def test_load_and_steps_tell_what_was_done(backend):
    engine = engine_of(backend, max_batched_tokens=8)
    engine.submit(key_of("a"), spec_of((1,) * 12, max_tokens=4))
    assert engine.load().queued_tokens == 12
    steps = [engine.step()]
    load = engine.load()
    assert (load.step, load.queued_tokens, load.running, load.prefill_tokens, load.decode_tokens) == (1, 4, 1, 8, 0)
    assert (load.blocks.owned, load.blocks.free) == (3, 37)
    steps += [engine.step(), engine.step()]
    engine.submit(key_of("b"), spec_of((2,) * 5, max_tokens=1))
    steps += [engine.step(), engine.step()]
    load = engine.load()
    assert (load.step, load.prefill_tokens, load.decode_steps, load.decode_tokens) == (5, 17, 3, 3)
    assert [(step.computed, step.prefill) for step in steps] == [(8, 8), (4, 4), (1, 0), (6, 5), (1, 0)]
    first, rest, joint = sum(range(1, 9)), sum(range(9, 13)), sum(range(1, 6))
    assert [step.context for step in steps] == [first, rest, 13, 14 + joint, 15]
    assert [step.prefill_context for step in steps] == [first, rest, 0, joint, 0]


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
