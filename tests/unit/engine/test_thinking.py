"""Models that think: fast prefill, chunks, caches, preemption and handoff against one chunk after the other."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from baton.core import HandoffId, Sampling, SequenceSpec, ThinkingState
from baton.engine.engine import Engine
from baton.engine.fixed import FixedShapes
from baton.engine.model.build import load_model
from baton.engine.model.thinking import Mode
from baton.errors import InvalidRequest
from baton.tokenizer import OracleTokenizer
from tests.unit.model.checkpoints import VOCAB
from tests.unit.model.thinking import thinking_checkpoint

CHUNK, BLOCK = 4, 8
MODES: tuple[Mode, ...] = ("auto", "fast", "sequential", "off")
SHAPES = FixedShapes(2, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("thinking")


@pytest.fixture(scope="module")
def reference(folder):
    return thinking_checkpoint(folder)


@pytest.fixture(scope="module")
def modes(folder, reference):
    return {mode: load_model(folder, block_size=BLOCK, thinking=mode) for mode in MODES}


def engine_of(backend, total_blocks=200, **options):
    return Engine(backend, OracleTokenizer(), total_blocks=total_blocks, **options)


def prompt_of(seed, length):
    rng = random.Random(f"prompt {seed}")
    return tuple(rng.randrange(VOCAB) for _ in range(length))


def spec_of(prompt, new=6, **changed):
    return SequenceSpec(prompt, Sampling(max_tokens=new, temperature=0.0, ignore_eos=True), **changed)


class Run:
    """Steps an engine until nothing is left to do; what it said, by request."""

    def __init__(self, engine):
        self.engine, self.tokens, self.thoughts, self.steps = engine, {}, {}, 0

    def submit(self, specs, **options):
        for number, spec in enumerate(specs):
            self.engine.submit(HandoffId(str(number), 1), spec, **options)
        return self

    def drain(self):
        while self.engine.has_work():
            self.step()
        return self

    def step(self):
        result = self.engine.step()
        assert not result.failed, result.failed
        self.steps += 1
        for key, thoughts in result.thoughts:
            known = self.thoughts.setdefault(key.request_id, [])
            assert [thought.chunk for thought in thoughts] == list(range(len(known), len(known) + len(thoughts)))
            known += [thought.token_ids for thought in thoughts]
        for output in result.outputs:
            self.tokens.setdefault(output.key.request_id, []).extend(token.token_id for token in output.tokens)
        return result


def alone(engine, spec):
    run = Run(engine).submit([spec]).drain()
    return run.tokens["0"], run.thoughts.get("0", [])


def needed_rounds(thoughts, length):
    """Forwards until the first token: one for each thought that some position of the prompt comes after, and one."""
    return 1 + sum(bool(thought) and (chunk + 1) * CHUNK < length for chunk, thought in enumerate(thoughts))


@pytest.mark.parametrize("mode", ["auto", "fast", "sequential"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 29, 64, 97])
def test_tokens_and_thoughts_are_those_of_the_reference(modes, reference, mode, length):
    for seed in range(2):
        prompt = prompt_of(seed, length)
        wanted = reference.answer(list(prompt), 6)
        assert alone(engine_of(modes[mode]), spec_of(prompt)) == (wanted.tokens, wanted.thoughts)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_families(tmp_path, family):
    reference = thinking_checkpoint(tmp_path, family, **({"sliding_window": 24} if family == "mistral" else {}))
    engine = engine_of(load_model(tmp_path, block_size=BLOCK))
    for seed in range(4):
        prompt = prompt_of(seed, 45)
        wanted = reference.answer(list(prompt), 6)
        assert alone(engine, spec_of(prompt)) == (wanted.tokens, wanted.thoughts)


@pytest.mark.parametrize(
    "changed",
    [
        {"input_layer": 1, "output_layer": 1},
        {"input_layer": 4, "output_layer": 4},
        {"chunk_size": 1},
        {"chunk_size": 8},
        {"max_thought_tokens": 1},
        {"max_thought_tokens": 6, "eos": 0.0},  # longer than a chunk, and never ended
        {"chunk_size": 2, "eos": 0.0},
    ],
)
def test_forms(tmp_path, changed):
    reference = thinking_checkpoint(tmp_path, **changed)
    engine = engine_of(load_model(tmp_path, block_size=BLOCK))
    for seed in range(3):
        prompt = prompt_of(seed, 30 + seed)
        wanted = reference.answer(list(prompt), 4)
        assert alone(engine, spec_of(prompt, 4)) == (wanted.tokens, wanted.thoughts)
        assert any(wanted.thoughts)


def test_rounds_are_the_thoughts_and_one(modes):
    for seed in range(8):
        prompt = prompt_of(seed, 80 + seed)
        run = Run(engine_of(modes["fast"])).submit([spec_of(prompt, 1)]).drain()
        assert run.steps == needed_rounds(run.thoughts["0"], len(prompt))
        by_chunk = Run(engine_of(modes["sequential"])).submit([spec_of(prompt, 1)]).drain()
        assert by_chunk.steps == -(-len(prompt) // CHUNK) > run.steps


def test_nothing_is_thought_when_it_is_off(modes, reference):
    differ = 0
    for seed in range(4):
        prompt = prompt_of(seed, 60)
        wanted = reference.answer(list(prompt), 6, thinks=False)
        assert alone(engine_of(modes["off"]), spec_of(prompt)) == (wanted.tokens, [])
        differ += wanted.tokens != reference.answer(list(prompt), 6).tokens
    assert differ >= 3
    assert modes["off"].fingerprint != modes["fast"].fingerprint == modes["sequential"].fingerprint


@pytest.mark.parametrize(
    ("budget", "total_blocks", "running"), [(2048, 400, 64), (37, 60, 5), (7, 30, 3), (64, 24, 64)]
)
@pytest.mark.parametrize("mode", ["auto", "fast", "sequential"])
def test_in_company_with_chunks_and_preemption(modes, budget, total_blocks, running, mode):
    specs = [spec_of(prompt_of(seed, 3 + 11 * seed), 20) for seed in range(9)]
    wanted = [alone(engine_of(modes["sequential"]), spec) for spec in specs]
    options = {"max_batched_tokens": budget, "max_running": running}
    engine = engine_of(modes[mode], total_blocks, **options)
    run = Run(engine).submit(specs).drain()
    for number, (tokens, thoughts) in enumerate(wanted):
        assert (run.tokens[str(number)], run.thoughts.get(str(number), [])) == (tokens, thoughts)
    if total_blocks == 24:
        assert engine.counters.preemptions


def test_cached_blocks_come_with_their_thoughts(modes):
    engine = engine_of(modes["fast"])
    prompt = prompt_of(1, 70)
    first = alone(engine, spec_of(prompt))
    again = Run(engine).submit([spec_of(prompt), spec_of(prompt[:50] + prompt_of(2, 20))]).drain()
    assert engine.counters.cached_tokens == 64 + 48
    assert (again.tokens["0"], again.thoughts["0"]) == first
    other = alone(engine_of(modes["fast"]), spec_of(prompt[:50] + prompt_of(2, 20)))
    assert (again.tokens["1"], again.thoughts["1"]) == other
    assert first[1][:12] == other[1][:12]


def test_what_was_generated_without_thoughts_is_found_by_nobody(modes):
    """A prompt that goes on with an answer is thought about all over; the answer's own KV was computed without."""
    engine = engine_of(modes["fast"])
    prompt = prompt_of(3, 20)
    answer = alone(engine, spec_of(prompt, 40))[0]
    longer = spec_of(prompt + tuple(answer))
    before = engine.counters.cached_tokens
    assert alone(engine, longer) == alone(engine_of(modes["fast"]), longer)
    assert engine.counters.cached_tokens - before == 16


def test_known_tokens_are_not_thought_about(modes):
    """A request that starts over elsewhere goes on as it would have, also if its answer is in the cache as a prompt."""
    engine = engine_of(modes["fast"])
    prompt = prompt_of(4, 22)
    tokens, thoughts = alone(engine, spec_of(prompt, 30))
    alone(engine, spec_of(prompt + tuple(tokens)))
    for known in (1, 7, 29):
        again = alone(engine, spec_of(prompt, 30, known=tuple(tokens[:known])))
        assert again == (tokens[known:], thoughts)


# --- thinking while decoding -------------------------------------------------------------------------------------


def test_thinking_while_decoding(modes, reference):
    differ = 0
    for seed in range(4):
        prompt = prompt_of(seed, 10 + seed)
        wanted = reference.answer(list(prompt), 24, while_decoding=True)
        for mode in ("auto", "fast", "sequential"):
            tokens, thoughts = alone(engine_of(modes[mode]), spec_of(prompt, 24, think_while_decoding=True))
            made = (len(prompt) + 23) // CHUNK
            assert (tokens, thoughts) == (wanted.tokens, wanted.thoughts[:made])
        differ += wanted.tokens != reference.answer(list(prompt), 24).tokens
    assert differ >= 3


def test_known_tokens_are_thought_about_while_decoding(modes):
    prompt = prompt_of(5, 13)
    asked = spec_of(prompt, 30, think_while_decoding=True)
    tokens, thoughts = alone(engine_of(modes["fast"]), asked)
    for known in (1, 8, 22):
        assert alone(engine_of(modes["fast"]), replace(asked, known=tuple(tokens[:known]))) == (
            tokens[known:],
            thoughts,
        )


# --- the handoff -------------------------------------------------------------------------------------------------


def handed_over(sender, receiver, spec, change=lambda state: state):
    """Prefill on one engine, decoding on another: tokens, and thoughts of both."""
    key = HandoffId("0", 1)
    run = Run(sender).submit([spec], hold=True).drain()
    n, layers = len(spec), range(sender.layout.layers)
    room, state = receiver.reserve(n), sender.thinking_state(key)
    wire = torch.empty(sender.layout.layers * n * sender.layout.layer_token_bytes, dtype=torch.uint8)
    sender.kv.gather(layers, sender.held(key).blocks, 0, n, wire)
    receiver.kv.scatter(layers, room.blocks, 0, n, wire)
    first = run.tokens["0"]
    try:
        receiver.adopt(key, replace(spec, known=(*spec.known, *first)), room, change(state))
    except ValueError:
        room.release()
        raise
    finally:
        sender.release(key)
    rest = Run(receiver)
    rest.thoughts["0"] = list(run.thoughts.get("0", []))
    rest.drain()
    return first + rest.tokens.get("0", []), rest.thoughts["0"]


@pytest.mark.parametrize("while_decoding", [False, True])
def test_handoff_at_every_offset_of_a_chunk(modes, while_decoding):
    sender, receiver = engine_of(modes["fast"]), engine_of(modes["fast"])
    for length in range(17, 17 + 2 * CHUNK):
        spec = spec_of(prompt_of(length, length), 14, think_while_decoding=while_decoding)
        assert handed_over(sender, receiver, spec) == alone(engine_of(modes["fast"]), spec)


def test_a_dropped_state_flips_answers(modes):
    """The control: what would come out if KV alone were handed over."""

    def without(state: ThinkingState) -> ThinkingState:
        return replace(state, state=bytes(len(state.state)))

    flipped = 0
    for length in range(17, 17 + 5 * CHUNK):
        spec = spec_of(prompt_of(length, length), 14)
        wanted = alone(engine_of(modes["fast"]), spec)
        flipped += handed_over(engine_of(modes["fast"]), engine_of(modes["fast"]), spec, without) != wanted
    print(f"{flipped} of {5 * CHUNK} flipped")
    assert flipped >= 5


def test_received_blocks_are_cached_with_their_thoughts(modes):
    sender, receiver = engine_of(modes["fast"]), engine_of(modes["fast"])
    spec = spec_of(prompt_of(6, 45))
    handed_over(sender, receiver, spec)
    assert alone(receiver, spec) == alone(engine_of(modes["fast"]), spec)
    assert receiver.counters.cached_tokens == 40


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda state: None, "without a thinking state"),
        (lambda state: replace(state, thinker="another"), "thinker another"),
        (lambda state: replace(state, chunk=2), "chunk 2, not 5"),
        (lambda state: replace(state, offset=0), "offset 0, not 1"),
        (lambda state: replace(state, state=b"123"), "state 3"),
        (lambda state: replace(state, rows=b"123"), "rows 3, not 0"),
        (lambda state: replace(state, thoughts=()), "thoughts 0, not 5"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(modes, change, named):
    receiver = engine_of(modes["fast"])
    with pytest.raises(ValueError, match=named):
        handed_over(engine_of(modes["fast"]), receiver, spec_of(prompt_of(7, 21)), change)
    assert receiver.pool.counts().free == receiver.pool.total


# --- deterministic requests --------------------------------------------------------------------------------------


def deterministic(prompt, new=20, **changed):
    return spec_of(prompt, new, deterministic=True, **changed)


@pytest.mark.slow
@pytest.mark.parametrize("exact_rows", [0, 64])
def test_deterministic_requests_think(modes, reference, exact_rows):
    shapes = replace(SHAPES, exact_rows=exact_rows)
    for seed, length in enumerate((5, 64, 130)):
        prompt = prompt_of(seed, length)
        wanted = reference.answer(list(prompt), 8)
        engine = engine_of(modes["fast"], shapes=shapes)
        assert alone(engine, deterministic(prompt, 8)) == (wanted.tokens, wanted.thoughts)


def logprobs_of(engine, spec, others=()):
    """Of one deterministic request, in some company."""
    asked = replace(spec, sampling=replace(spec.sampling, logprobs=3))
    for number, other in enumerate(others):
        engine.submit(HandoffId(f"other {number}", 1), other)
    engine.submit(HandoffId("0", 1), asked)
    found, thoughts = [], []
    while engine.has_work():
        result = engine.step()
        thoughts += [thought for key, made in result.thoughts if key.request_id == "0" for thought in made]
        found += [token for output in result.outputs if output.key.request_id == "0" for token in output.tokens]
    return [(token.token_id, token.logprobs) for token in found], thoughts


def test_bits_do_not_depend_on_company_cache_or_chunks(modes):
    spec = deterministic(prompt_of(8, 150), 24)
    alone_bits = logprobs_of(engine_of(modes["fast"], shapes=SHAPES), spec)
    others = [spec_of(prompt_of(seed, 9 * seed + 2), 30) for seed in range(6)] + [deterministic(prompt_of(9, 70))]
    engine = engine_of(modes["fast"], shapes=SHAPES, max_batched_tokens=96)
    assert logprobs_of(engine, spec, others) == alone_bits
    assert logprobs_of(engine, spec, others[:3]) == alone_bits  # most of its prompt is in the cache now
    assert engine.counters.cached_tokens >= 128
    known = tuple(token for token, _ in alone_bits[0][:11])
    again, thoughts = logprobs_of(engine_of(modes["fast"], shapes=SHAPES), replace(spec, known=known))
    assert (again, thoughts) == (alone_bits[0][11:], alone_bits[1])


def test_what_cannot_be_computed_is_refused_by_name(modes):
    engine = engine_of(modes["fast"], shapes=SHAPES)
    with pytest.raises(InvalidRequest, match="think_while_decoding: not together with deterministic"):
        engine.validate(deterministic((1, 2), think_while_decoding=True))


def test_chunks_that_do_not_divide_the_grid_are_not_deterministic(tmp_path):
    thinking_checkpoint(tmp_path, chunk_size=3)
    backend = load_model(tmp_path, block_size=6)
    assert "chunks of 3 tokens" in backend.nondeterminism
