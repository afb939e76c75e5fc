"""Models that think: fast prefill, chunks, caches, preemption and handoff against one chunk after the other."""

import random
from dataclasses import replace
from functools import partial

import pytest
from torch.nn.functional import scaled_dot_product_attention

from baton.engine.determinism.shapes import FixedShapes
from baton.engine.models.loading import load_model
from baton.engine.models.thinking import Mode
from baton.engine.thinking import ALL, Notes, Thinking
from baton.errors import InvalidRequest
from tests.support import engines
from tests.support.engines import key_of, numbers, run, spec_of
from tests.unit.model.checkpoints import VOCAB, thinking_checkpoint

pytestmark = pytest.mark.slow

CHUNK, BLOCK = 4, 8
MODES: tuple[Mode, ...] = ("auto", "fast", "sequential", "off")
SHAPES = FixedShapes(2, 16)
engine_of = partial(engines.engine_of, total_blocks=200)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return (folder := tmp_path_factory.mktemp("thinking")), thinking_checkpoint(folder)


@pytest.fixture(scope="module")
def reference(checkpoint):
    return checkpoint[1]


@pytest.fixture(scope="module")
def modes(checkpoint):
    return {mode: load_model(checkpoint[0], block_size=BLOCK, thinking=mode) for mode in MODES}


@pytest.fixture
def fast(modes):
    """Makes engines that think in as few forwards as possible."""
    return partial(engine_of, modes["fast"])


def asked_for(seed, length, new=6, **options):
    return spec_of(numbers(random.Random(f"prompt {seed}"), length, VOCAB), max_tokens=new, **options)


def answer(found, number=0):
    return found.ids(key_of(number)), found.thoughts[key_of(number)]


def alone(engine, spec):
    return answer(run(engine, [spec]))


def wanted_of(reference, spec, **options):
    return reference.answer(list(spec.prompt), spec.sampling.max_tokens, **options)


def needed_rounds(thoughts, length):
    """Return the forwards until the first token: one for each thought before some position of the prompt, plus one."""
    return 1 + sum(bool(thought) and (chunk + 1) * CHUNK < length for chunk, thought in enumerate(thoughts))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 29, 64, 97])
def test_tokens_and_thoughts_are_those_of_the_reference(modes, reference, length):
    for seed in range(2):
        spec = asked_for(seed, length)
        wanted = wanted_of(reference, spec)
        assert [alone(engine_of(modes[mode]), spec) for mode in ("auto", "fast", "sequential")] == [wanted] * 3


def test_attention_that_returns_another_memory_order(modes, reference, monkeypatch):
    """On a GPU, `scaled_dot_product_attention` returns [B, heads, L, D] in the memory order of [B, L, heads, D]."""
    name, usual = "baton.engine.models.thinking.scaled_dot_product_attention", scaled_dot_product_attention
    spec = asked_for(0, 29)
    monkeypatch.setattr(name, lambda *a, **more: usual(*a, **more).transpose(1, 2).contiguous().transpose(1, 2))
    assert alone(engine_of(modes["fast"]), spec) == wanted_of(reference, spec)


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("mistral", {"sliding_window": 24}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("llama", {"input_layer": 1, "output_layer": 1}),
        ("llama", {"input_layer": 4, "output_layer": 4}),
        ("llama", {"chunk_size": 1}),
        ("llama", {"chunk_size": 8}),
        ("llama", {"max_thought_tokens": 1}),
        ("llama", {"max_thought_tokens": 6, "eos": 0.0}),  # longer than a chunk, and never ended
        ("llama", {"chunk_size": 2, "eos": 0.0}),
    ],
)
def test_families_and_forms(tmp_path, family, changed):
    reference = thinking_checkpoint(tmp_path, family, **changed)
    engine, thoughts = engine_of(load_model(tmp_path, block_size=BLOCK)), []
    for seed in range(3):
        spec = asked_for(seed, 22 + 7 * seed, 4)
        wanted = wanted_of(reference, spec)
        assert alone(engine, spec) == wanted
        thoughts += wanted[1]
    assert any(thoughts)


def test_rounds_are_the_thoughts_and_one(modes, monkeypatch):
    """Without a limit, as on a GPU. The limit of a CPU adds forwards without a thought."""
    more = 0
    for seed in range(8):
        spec = asked_for(seed, 80 + seed, 1)
        limited, by_chunk = run(engine_of(modes["fast"]), [spec]), run(engine_of(modes["sequential"]), [spec])
        with monkeypatch.context() as patched:
            patched.setattr(modes["fast"].thinker, "unlimited", True)
            found = run(engine_of(modes["fast"]), [spec])
        assert answer(found) == answer(limited) == answer(by_chunk)
        assert found.steps == needed_rounds(found.thoughts[key_of(0)], len(spec)) <= limited.steps
        assert by_chunk.steps == -(-len(spec) // CHUNK) > limited.steps
        more += limited.steps - found.steps
    assert 0 < more < 8


def test_a_limited_forward_follows_the_distances_of_thoughts():
    thinking = Thinking(Notes(1), CHUNK, until=ALL, shared=0, ahead=16, least=1)
    found = []
    for tokens, stopped in [(16, False), (8, True), (4, True), (4, True), (12, False), (24, True)]:
        thinking.update_ahead(tokens, stopped=stopped)
        found.append(thinking.ahead)
    assert found == [32, 36, 21, 16, 32, 25]
    unlimited = Thinking(Notes(1), CHUNK, until=ALL, shared=0)
    unlimited.update_ahead(4, stopped=True)
    assert unlimited.ahead == ALL


def test_nothing_is_thought_when_it_is_off(modes, reference):
    specs = [asked_for(seed, 60) for seed in range(4)]
    wanted = [wanted_of(reference, spec, thinks=False) for spec in specs]
    assert [alone(engine_of(modes["off"]), spec) for spec in specs] == wanted
    assert [thoughts for _, thoughts in wanted] == [[]] * 4
    assert sum(each[0] != wanted_of(reference, spec)[0] for each, spec in zip(wanted, specs, strict=True)) >= 3
    assert modes["off"].fingerprint != modes["fast"].fingerprint == modes["sequential"].fingerprint


@pytest.mark.sample(4)
@pytest.mark.parametrize(("budget", "total_blocks", "running"), [(2048, 400, 64), (7, 30, 3), (64, 24, 64)])
@pytest.mark.parametrize("mode", ["auto", "fast", "sequential"])
def test_in_company_with_chunks_and_preemption(modes, budget, total_blocks, running, mode):
    specs = [asked_for(seed, 3 + 11 * seed, 20) for seed in range(9)]
    engine = engine_of(modes[mode], total_blocks=total_blocks, max_batched_tokens=budget, max_running=running)
    found = run(engine, specs)
    for number, spec in enumerate(specs):
        assert answer(found, number) == alone(engine_of(modes["sequential"]), spec)
    assert engine.counters.preemptions or total_blocks != 24


def test_cached_blocks_come_with_their_thoughts(fast):
    engine, spec = fast(), asked_for(1, 70)
    other = replace(spec, prompt=spec.prompt[:50] + asked_for(2, 20).prompt)
    first, wanted = alone(engine, spec), alone(fast(), other)
    again = run(engine, [spec, other])
    assert engine.counters.cached_tokens == 64 + 48
    assert [answer(again, 0), answer(again, 1)] == [first, wanted]
    assert first[1][:12] == wanted[1][:12]


def test_what_was_generated_without_thoughts_is_not_found(fast):
    """The whole prompt is thought about again, because the KV of the earlier answer was computed without thoughts."""
    engine, spec = fast(), asked_for(3, 20, 40)
    longer = spec_of((*spec.prompt, *alone(engine, spec)[0]))
    before = engine.counters.cached_tokens
    assert alone(engine, longer) == alone(fast(), longer)
    assert engine.counters.cached_tokens - before == 16


@pytest.mark.parametrize("while_decoding", [False, True])
def test_known_tokens_are_thought_about_only_while_decoding(fast, while_decoding):
    """A restarted request continues in the same way, even if its answer is cached as part of a prompt."""
    engine, spec = fast(), asked_for(4, 22, 30, think_while_decoding=while_decoding)
    tokens, thoughts = alone(engine, spec)
    alone(engine, spec_of((*spec.prompt, *tokens)))
    for known in (1, 7, 8, 22, 29):
        assert alone(engine, replace(spec, known=tuple(tokens[:known]))) == (tokens[known:], thoughts)


def test_thinking_while_decoding(modes, reference):
    differ = 0
    for seed in range(4):
        spec = asked_for(seed, 10 + seed, 24, think_while_decoding=True)
        tokens, thoughts = wanted_of(reference, spec, while_decoding=True)
        for mode in ("auto", "fast", "sequential"):
            assert alone(engine_of(modes[mode]), spec) == (tokens, thoughts[: (len(spec) + 23) // CHUNK])
        differ += tokens != wanted_of(reference, spec)[0]
    assert differ >= 3


def handed_over(sender, receiver, spec, change=lambda state: state):
    found = engines.hand_over(sender, receiver, spec, change=change)
    return found.ids(key_of()), found.thoughts[key_of()]


@pytest.mark.parametrize("while_decoding", [False, True])
def test_handoff_at_every_offset_of_a_chunk(fast, while_decoding):
    sender, receiver = fast(), fast()
    for length in range(17, 17 + 2 * CHUNK):
        spec = asked_for(length, length, 14, think_while_decoding=while_decoding)
        before = receiver.counters.cached_tokens
        assert handed_over(sender, receiver, spec) == alone(fast(), spec) == alone(receiver, spec)
        assert receiver.counters.cached_tokens - before == (length - 1) // BLOCK * BLOCK, "with their thoughts"


@pytest.mark.parametrize("while_decoding", [False, True])
@pytest.mark.parametrize("after", [1, 2, 3, 5, 9])
def test_a_move_takes_the_thoughts_along(fast, while_decoding, after):
    spec = asked_for(after, 18, 14, think_while_decoding=while_decoding)
    found = engines.move(fast(), fast(), spec, after)
    assert (found.ids(key_of()), found.thoughts[key_of()]) == alone(fast(), spec)


@pytest.mark.parametrize("candidates", [1, 3, 4, 6])
def test_a_deterministic_request_moves_with_unverified_candidates(fast, candidates):
    spec, shapes = asked_for(candidates, 18, 60, deterministic=True), replace(SHAPES, exact_rows=0)
    found = engines.move(fast(shapes=shapes), fast(shapes=shapes), spec, 1, candidates=candidates)
    assert (found.ids(key_of()), found.thoughts[key_of()]) == alone(fast(shapes=shapes), spec)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (None, "without a thinking state"),
        ({"thinker": "another"}, "thinker another"),
        ({"chunk": 2}, "chunk 2, not 5"),
        ({"offset": 0}, "offset 0, not 1"),
        ({"state": b"123"}, "state 3"),
        ({"rows": b"123"}, "rows 3, not 0"),
        ({"thoughts": ()}, "thoughts 0, not 5"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(fast, changed, named):
    receiver = fast()
    with pytest.raises(ValueError, match=named):
        handed_over(fast(), receiver, asked_for(7, 21), lambda state: replace(state, **changed) if changed else None)
    assert receiver.pool.counts().free == receiver.pool.total


@pytest.mark.parametrize("exact_rows", [0, 64])
def test_deterministic_requests_think(fast, reference, exact_rows):
    for seed, length in enumerate((5, 64, 130)):
        spec = asked_for(seed, length, 8, deterministic=True)
        engine = fast(shapes=replace(SHAPES, exact_rows=exact_rows))
        assert alone(engine, spec) == wanted_of(reference, spec)


def logprobs_of(engine, spec, others=()):
    found, key = run(engine, [*others, spec]), key_of(len(others))
    return [(token.token_id, token.logprobs) for token in found.tokens[key]], found.thoughts[key]


def test_bits_do_not_depend_on_company_cache_or_chunks(fast):
    spec = asked_for(8, 150, 24, deterministic=True, logprobs=3)
    bits, thoughts = logprobs_of(fast(shapes=SHAPES), spec)
    others = [asked_for(seed, 9 * seed + 2, 30) for seed in range(6)] + [asked_for(9, 70, 20, deterministic=True)]
    engine = fast(shapes=SHAPES, max_batched_tokens=96)
    assert logprobs_of(engine, spec, others) == (bits, thoughts)
    assert logprobs_of(engine, spec, others[:3]) == (bits, thoughts)  # now most of its prompt is cached
    assert engine.counters.cached_tokens >= 128
    known = tuple(token for token, _ in bits[:11])
    assert logprobs_of(fast(shapes=SHAPES), replace(spec, known=known)) == (bits[11:], thoughts)


def test_thinking_while_decoding_is_refused_for_deterministic_requests(fast):
    with pytest.raises(InvalidRequest, match="think_while_decoding: cannot be combined with deterministic"):
        fast(shapes=SHAPES).validate(spec_of((1, 2), deterministic=True, think_while_decoding=True))


def test_chunks_that_do_not_divide_the_grid_are_not_deterministic(tmp_path):
    thinking_checkpoint(tmp_path, chunk_size=3)
    assert "chunks of 3 tokens" in load_model(tmp_path, block_size=6).nondeterminism
