import random

import pytest
import torch

from baton.core import Finish, FinishReason, HandoffId, Sampling, SequenceSpec, Token
from baton.engine.blocks import Allocation, BlockState
from baton.engine.engine import Engine
from baton.engine.generate import generate
from baton.engine.oracle import OracleBackend, oracle_layout
from baton.engine.reservation import Reservation
from baton.errors import EngineFault, InvalidRequest
from baton.tokenizer import ORACLE_EOS, OracleTokenizer

BLOCK = 4


@pytest.fixture(scope="module")
def backend():
    return OracleBackend(oracle_layout(block_size=BLOCK), max_model_len=128)


def engine_of(backend, total_blocks=40, **options):
    return Engine(backend, OracleTokenizer(), total_blocks=total_blocks, **options)


def mixed_spec(rng):
    """Any mix of the parameters, so that any mix of them meets in a batch."""
    sampling = Sampling(
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
    return SequenceSpec(tuple(rng.randrange(256) for _ in range(rng.randint(1, 30))), sampling)


def tables():
    streams: dict[HandoffId, list[Token]] = {}
    finishes: dict[HandoffId, Finish] = {}
    return streams, finishes


def drain(engine, streams, finishes, on_step=None):
    """Step until nothing is left to do; a stream and a finish per key. Fails if a key goes on after its end."""
    while engine.has_work():
        result = engine.step()
        assert result.failed == []
        for output in result.outputs:
            assert output.key not in finishes
            streams.setdefault(output.key, []).extend(output.tokens)
            if output.finish is not None:
                finishes[output.key] = output.finish
        engine.pool.counts()
        if on_step is not None:
            on_step(result)


def text_of(tokens, finish):
    return "".join(token.text for token in tokens) + finish.tail


@pytest.fixture(scope="module")
def solo(backend):
    """32 mixed requests with their solo runs, which must be what the oracle expects."""
    rng = random.Random(20)
    found = {}
    for i in range(32):
        spec = mixed_spec(rng)
        alone = generate(engine_of(backend), spec)
        assert [t.token_id for t in alone.tokens] == backend.expected(spec)
        found[HandoffId(f"r{i}", 1)] = (spec, alone)
    reasons = {alone.finish.reason for _, alone in found.values()}
    assert reasons == set(FinishReason), "the mix is too tame"
    return found


@pytest.mark.parametrize(
    ("total_blocks", "budget", "max_running"),
    [(400, 2048, 64), (400, 7, 64), (64, 16, 5), (24, 2048, 64), (18, 1, 3), (18, 33, 64), (20, 5, 64)],
)
def test_concurrent_mixed_requests_each_equal_their_solo_run(backend, solo, total_blocks, budget, max_running):
    engine = engine_of(backend, total_blocks, max_batched_tokens=budget, max_running=max_running)
    for key, (spec, _) in solo.items():
        engine.submit(key, spec)
    streams, finishes = tables()
    drain(engine, streams, finishes)
    for key, (_, alone) in solo.items():
        assert (streams[key], finishes[key]) == (alone.tokens, alone.finish)
        assert text_of(streams[key], finishes[key]) == alone.text
    assert engine.pool.available == total_blocks
    assert (engine.counters.preemptions > 0) == (total_blocks <= 24 and max_running > 3)


@pytest.mark.parametrize("number", range(6))
def test_staggered_arrivals_aborts_and_other_holders(backend, solo, number):
    rng = random.Random(number)
    engine = engine_of(backend, 30, max_batched_tokens=rng.choice([3, 10, 60]), max_running=rng.choice([2, 6, 40]))
    waiting, aborted, foreign = list(solo), set[HandoffId](), list[Allocation]()
    streams, finishes = tables()

    def shake(result=None):
        for key in waiting[: rng.randint(0, 3)]:
            waiting.remove(key)
            engine.submit(key, solo[key][0])
        victim = rng.choice(list(solo))
        if rng.random() < 0.1 and victim not in finishes and victim not in waiting:
            engine.release(victim)
            aborted.add(victim)
        shake_foreign()

    def shake_foreign():
        if foreign and rng.random() < 0.5:
            foreign.pop().release()
        elif rng.random() < 0.2 and (allocation := engine.reserve(rng.randint(1, 20))) is not None:
            foreign.append(allocation)

    while waiting:
        shake()
        drain(engine, streams, finishes, shake)
    for allocation in foreign:
        allocation.release()
    assert engine.pool.available == 30
    assert set(finishes) | aborted == set(solo)
    for key, (_, alone) in solo.items():
        whole = streams.get(key, [])
        assert whole == alone.tokens[: len(whole)]
        assert key in aborted or (whole, finishes[key]) == (alone.tokens, alone.finish)


def test_handed_back_requests_go_on_elsewhere_with_the_same_tokens(backend, solo):
    first, second = engine_of(backend, 24, recompute_preempted=False), engine_of(backend, 400)
    (streams, finishes), handed_back = tables(), list[HandoffId]()
    for key, (spec, _) in solo.items():
        first.submit(key, spec)
    drain(first, streams, finishes, lambda result: handed_back.extend(result.preempted))
    assert len(handed_back) >= 2
    assert len(set(handed_back)) == len(handed_back)
    assert first.pool.available == 24
    first.submit(handed_back[0], solo[handed_back[0]][0])  # forgotten, so it may come back
    for key in handed_back:
        spec = solo[key][0]
        known = tuple(t.token_id for t in streams.get(key, []))
        second.submit(key, SequenceSpec(spec.prompt, spec.sampling, known))
    drain(second, streams, finishes)
    for key, (_, alone) in solo.items():
        assert (streams[key], finishes[key]) == (alone.tokens, alone.finish)


@pytest.mark.parametrize("cut", [1, 3, 10])
def test_known_tokens_are_replayed_not_sampled(backend, solo, cut):
    engine = engine_of(backend)
    for spec, alone in solo.values():
        if len(alone.tokens) <= cut:
            continue
        known = tuple(t.token_id for t in alone.tokens[:cut])
        rest = generate(engine, SequenceSpec(spec.prompt, spec.sampling, known))
        assert (rest.tokens, rest.finish) == (alone.tokens[cut:], alone.finish)


@pytest.mark.parametrize("adopt", [False, True])
def test_what_known_tokens_have_ended_ends_at_once_without_sampling(backend, adopt):
    engine = engine_of(backend)
    spec = SequenceSpec((1, 2, 3), Sampling(max_tokens=2, stop=("zz",)), tuple(b"az"))
    key = HandoffId("r", 1)
    wanted = Finish(FinishReason.LENGTH, tail="z")
    assert engine.finish_of(spec) == wanted
    if adopt:
        engine.adopt(key, spec, engine.reserve(len(spec)))
    else:
        engine.submit(key, spec)
    assert engine.has_work()
    with pytest.raises(ValueError, match="already here"):
        engine.submit(key, spec)
    result = engine.step()
    assert [(o.key, o.tokens, o.finish) for o in result.outputs] == [(key, [], wanted)]
    assert result.computed == 0
    assert not engine.has_work()
    assert engine.pool.available == 40


def test_released_before_its_ending_was_told(backend):
    engine = engine_of(backend)
    engine.submit(key := HandoffId("r", 1), SequenceSpec((1,), Sampling(max_tokens=1), (65,)))
    engine.release(key)
    assert engine.step().outputs == []


def test_end_tokens_are_neither_streamed_nor_counted(backend):
    engine = engine_of(backend)
    for token_id, sampling, reason in (
        (ORACLE_EOS, Sampling(logit_bias=((ORACLE_EOS, 100.0),)), FinishReason.EOS),
        (65, Sampling(logit_bias=((65, 100.0),), stop_token_ids=(65,)), FinishReason.STOP_TOKEN),
    ):
        generation = generate(engine, SequenceSpec((1, 2), sampling))
        assert generation == ([], "", Finish(reason, str(token_id)))
    banned = Sampling(logit_bias=((ORACLE_EOS, 100.0),), min_tokens=5, max_tokens=9)
    assert len(generate(engine, SequenceSpec((1, 2), banned)).tokens) == 5
    ignored = Sampling(logit_bias=((ORACLE_EOS, 100.0),), ignore_eos=True, max_tokens=4)
    generation = generate(engine, SequenceSpec((1, 2), ignored))
    assert [t.token_id for t in generation.tokens] == [ORACLE_EOS] * 4
    assert generation.text == ""


@pytest.mark.parametrize("options", [{"total_blocks": 5}, {"max_model_len": 20}])
def test_ends_at_max_model_len(backend, options):
    engine = engine_of(backend, **options)
    assert engine.max_model_len == 20
    generation = generate(engine, SequenceSpec((1,) * 17, Sampling(max_tokens=99, ignore_eos=True)))
    assert (len(generation.tokens), generation.finish.reason) == (3, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (SequenceSpec((), Sampling()), "prompt"),
        (SequenceSpec((1,) * 128, Sampling()), "prompt"),
        (SequenceSpec((1,) * 100, Sampling(), (1,) * 29), "prompt"),
        (SequenceSpec((1, 257), Sampling()), "prompt"),
        (SequenceSpec((1, -1), Sampling()), "prompt"),
        (SequenceSpec((1,), Sampling(), (300,)), "prompt"),
        (SequenceSpec((1,), Sampling(stop_token_ids=(257,))), "sampling.stop_token_ids"),
        (SequenceSpec((1,), Sampling(logit_bias=((257, 1.0),))), "sampling.logit_bias"),
    ],
)
def test_what_can_never_run_is_refused_by_field(backend, spec, field):
    engine = engine_of(backend)
    with pytest.raises(InvalidRequest) as caught:
        engine.submit(HandoffId("r", 1), spec)
    assert caught.value.violations[0].field == field
    assert not engine.has_work()


def test_reserve_leaves_room_to_grow_and_to_those_who_wait(backend):
    engine = engine_of(backend, total_blocks=6, max_running=1)
    whole = engine.reserve(23)
    assert len(whole.blocks) == 6
    assert engine.reserve(0) is None
    whole.release()
    assert engine.reserve(24) is None
    engine.submit(HandoffId("a", 1), SequenceSpec((1,) * 5, Sampling(ignore_eos=True)))
    engine.step()
    assert engine.reserve(12) is None, "2 are owned, and 1 is to grow into"
    engine.submit(HandoffId("b", 1), SequenceSpec((1,) * 5, Sampling(ignore_eos=True)))
    assert engine.reserve(4) is None, "2 more are for the one that waits"
    assert len(engine.reserve(3).blocks) == 1
    assert engine.load().waiting == engine.load().running == 1


def test_adopt_takes_only_a_fitting_reservation(backend):
    engine, other = engine_of(backend), engine_of(backend)
    spec = SequenceSpec((1,) * 9, Sampling(ignore_eos=True), (65,))
    key = HandoffId("r", 1)
    used = Reservation(engine.pool.allocate(0), engine.pool.allocate(3), 0)
    for wrong, named in ((engine.reserve(3), "1 blocks"), (other.reserve(9), "does not fit"), (used, "is owned")):
        with pytest.raises(ValueError, match=named):
            engine.adopt(key, spec, wrong)
        wrong.release()
    engine.adopt(key, spec, right := engine.reserve(9))
    assert right.own.state is BlockState.OWNED
    engine.release(key)
    assert engine.pool.available == 40


def test_held_blocks_stay_until_release_also_in_quarantine(backend):
    engine = engine_of(backend)
    key = HandoffId("r", 1)
    engine.submit(key, SequenceSpec((1,) * 9, Sampling(ignore_eos=True)), hold=True)
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
    assert engine.pool.available == 40


def test_held_request_may_end_with_its_first_token(backend):
    engine = engine_of(backend)
    engine.submit(key := HandoffId("r", 1), SequenceSpec((1, 2), Sampling(max_tokens=1, ignore_eos=True)), hold=True)
    (output,) = engine.step().outputs
    assert (len(output.tokens), output.finish.reason) == (1, FinishReason.LENGTH)
    assert len(engine.held(key)) == 1
    engine.release(key)
    engine.release(key)
    assert engine.pool.available == 40


def test_stalled_engine_says_so(backend):
    engine = engine_of(backend, total_blocks=4)
    taken = engine.pool.allocate(4, reserved=True)
    engine.submit(HandoffId("r", 1), SequenceSpec((1,), Sampling(max_tokens=1)))
    assert engine.step().computed == 0
    assert engine.has_work()
    with pytest.raises(EngineFault, match="no room"):
        generate(engine, SequenceSpec((1,), Sampling()))
    taken.release()
    assert engine.step().computed == 1


class Faulty:
    """The oracle, but a poisonous token makes it fail."""

    def __init__(self, backend, poison):
        self.backend, self.poison = backend, poison
        self.name, self.layout, self.fingerprint = backend.name, backend.layout, backend.fingerprint
        self.vocab_size, self.max_model_len, self.device = backend.vocab_size, backend.max_model_len, backend.device
        self.make_cache, self.thinker = backend.make_cache, None

    def forward(self, batch, kv):
        logits = self.backend.forward(batch, kv)
        poisoned = (batch.token_ids == 13).nonzero().flatten()
        if len(poisoned) and self.poison == "raise":
            raise RuntimeError("out of luck")
        logits[torch.isin(batch.logit_rows, poisoned)] = float("nan")
        return logits


def test_backend_that_raises_fails_only_its_batch(backend):
    engine = engine_of(Faulty(backend, "raise"), max_running=2)
    sampling = Sampling(max_tokens=5, ignore_eos=True)
    specs = [SequenceSpec(tuple(prompt), sampling) for prompt in (b"ab", b"a\r", b"cd", b"ef")]
    for i, spec in enumerate(specs):
        engine.submit(HandoffId(str(i), 1), spec)
    result = engine.step()
    assert [(key.request_id, str(fault)) for key, fault in result.failed] == [
        ("0", "RuntimeError: out of luck"),
        ("1", "RuntimeError: out of luck"),
    ]
    streams, finishes = tables()
    drain(engine, streams, finishes)
    for i in (2, 3):
        assert [t.token_id for t in streams[HandoffId(str(i), 1)]] == backend.expected(specs[i])
    assert engine.pool.available == 40


def test_row_without_numbers_fails_alone(backend):
    engine = engine_of(Faulty(backend, "nan"))
    for name, prompt in (("good", b"ab"), ("bad", b"a\r")):
        engine.submit(HandoffId(name, 1), SequenceSpec(tuple(prompt), Sampling()))
    result = engine.step()
    assert [key.request_id for key, _ in result.failed] == ["bad"]
    assert [output.key.request_id for output in result.outputs] == ["good"]
    engine.release(HandoffId("good", 1))
    assert engine.pool.available == 40


def test_load_counts_what_was_done(backend):
    engine = engine_of(backend, max_batched_tokens=8)
    engine.submit(HandoffId("a", 1), SequenceSpec((1,) * 12, Sampling(max_tokens=3, ignore_eos=True)))
    assert engine.load().queued_tokens == 12
    engine.step()
    load = engine.load()
    assert (load.step, load.queued_tokens, load.running, load.prefill_tokens, load.decode_tokens) == (1, 4, 1, 8, 0)
    assert (load.blocks.owned, load.blocks.free) == (3, 37)
    drain(engine, {}, {})
    load = engine.load()
    assert (load.step, load.prefill_tokens, load.decode_steps, load.decode_tokens) == (4, 12, 2, 2)


def test_a_step_tells_of_what_kind_it_was_and_how_far_its_tokens_look_back(backend):
    engine = engine_of(backend, max_batched_tokens=8)
    engine.submit(HandoffId("a", 1), SequenceSpec((1,) * 12, Sampling(max_tokens=3, ignore_eos=True)))
    steps = [engine.step() for _ in range(4)]
    assert [(step.computed, step.prefill) for step in steps] == [(8, 8), (4, 4), (1, 0), (1, 0)]
    assert [step.context for step in steps] == [sum(range(1, 9)), sum(range(9, 13)), 13, 14]
    assert [step.prefill_context for step in steps] == [sum(range(1, 9)), sum(range(9, 13)), 0, 0]


def test_of_a_joint_step_it_is_told_what_was_computed_of_prompts(backend):
    engine = engine_of(backend)
    engine.submit(HandoffId("a", 1), SequenceSpec((1,) * 12, Sampling(max_tokens=3, ignore_eos=True)))
    engine.step()
    engine.submit(HandoffId("b", 1), SequenceSpec((2,) * 5, Sampling(max_tokens=3, ignore_eos=True)))
    step = engine.step()
    assert (step.computed, step.prefill) == (6, 5)
    assert (step.context, step.prefill_context) == (13 + sum(range(1, 6)), sum(range(1, 6)))
