import random
from dataclasses import replace

import pytest
import torch

from baton.core import HandoffId, Sampling, SequenceSpec
from baton.engine.engine import Engine
from baton.engine.generate import generate
from baton.engine.model.build import load_model
from baton.engine.oracle import OracleBackend, oracle_layout
from baton.engine.prefix import Chain, named_blocks, names_of, scope_key
from baton.tokenizer import OracleTokenizer
from tests.unit.model.checkpoints import VOCAB, random_checkpoint

BLOCK = 4
GREEDY = Sampling(max_tokens=9, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def backend():
    return OracleBackend(oracle_layout(block_size=BLOCK), max_model_len=128)


def engine_of(backend, total_blocks=40, **options):
    return Engine(backend, OracleTokenizer(), total_blocks=total_blocks, **options)


def tokens_of(engine, prompt, sampling=GREEDY, **fields):
    """The output tokens of a request, and how many of its tokens were cached."""
    before = engine.counters.cached_tokens
    found = generate(engine, SequenceSpec(tuple(prompt), sampling, **fields))
    return [token.token_id for token in found.tokens], engine.counters.cached_tokens - before


# --- names


def names(scope, tokens, block_size=BLOCK):
    chain = Chain(scope_key("model", scope), tokens, block_size)
    return [chain.digest(i) for i in range(len(tokens) // block_size)]


def test_a_name_says_all_tokens_up_to_its_end_in_its_scope():
    tokens = list(range(12))
    one = names("", tokens)
    assert names("", list(range(12))) == one
    assert len(set(one)) == 3
    for changed in range(12):
        other = names("", [*tokens[:changed], 99, *tokens[changed + 1 :]])
        assert [a == b for a, b in zip(one, other, strict=True)] == [i < changed // BLOCK for i in range(3)]
    assert not set(one) & set(names("me", tokens))
    assert not set(one) & set(names("", tokens, 2)) | set(names("", tokens)) & set(names("", tokens, 6))
    assert scope_key("a", "bc") != scope_key("ab", "c")


def test_names_of_repeated_blocks_differ():
    assert len(set(names("", [7] * 40))) == 10


def test_a_chain_grows_with_its_tokens_and_never_names_half_a_block():
    tokens = [1, 2, 3, 4, 5]
    chain = Chain(scope_key("model", ""), tokens, BLOCK)
    with pytest.raises(IndexError, match="block 1 is not full: 1 of 4"):
        chain.digest(1)
    tokens += [6, 7, 8]
    assert [chain.digest(1), chain.digest(0)] == names("", [1, 2, 3, 4, 5, 6, 7, 8])[::-1]
    tokens += [9, 10, 11, 12]
    assert chain.digests(1, 3) == [chain.digest(1), chain.digest(2)]


# --- what is found


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (30, 28)])
def test_the_same_prompt_again_computes_the_rest_and_at_least_one_token(backend, length, hit):
    engine, prompt = engine_of(backend), b"The quick brown fox jumps over the lazy dog"[:length]
    first, missed = tokens_of(engine, prompt)
    computed = engine.counters.prefill_tokens
    again, cached = tokens_of(engine, prompt)
    assert (first, missed, cached) == (backend.expected(SequenceSpec(tuple(prompt), GREEDY)), 0, hit)
    assert again == first
    assert engine.counters.prefill_tokens == computed + length - hit


def test_what_decode_filled_is_found_by_the_next_turn(backend):
    engine, prompt = engine_of(backend), tuple(b"hello you")
    answer, _ = tokens_of(engine, prompt)
    follow_up = (*prompt, *answer, *b"?")
    found, cached = tokens_of(engine, follow_up)
    assert cached == 16  # 9 + 9 tokens, of which the last was never fed back
    assert found == backend.expected(SequenceSpec(follow_up, GREEDY))


def test_adopted_blocks_are_found_only_once_they_are_adopted(backend):
    sender, receiver, key = engine_of(backend), engine_of(backend), HandoffId("r", 1)
    prompt = tuple(b"what is the largest ocean?")
    sender.submit(key, SequenceSpec(prompt, GREEDY), hold=True)
    first = sender.step().outputs[0].tokens[0].token_id
    reserved = receiver.reserve(len(prompt))
    kv = torch.empty(2 * len(prompt) * sender.layout.layer_token_bytes, dtype=torch.uint8)
    sender.kv.gather(range(2), sender.held(key).blocks, 0, len(prompt), kv)
    receiver.kv.scatter(range(2), reserved.blocks, 0, len(prompt), kv)
    assert tokens_of(receiver, prompt)[1] == 0, "reserved blocks may still be written by a peer"
    receiver.pool.allocate(receiver.pool.available, reserved=True).release()  # evicts what that has left
    receiver.adopt(key, SequenceSpec(prompt, GREEDY, (first,)), reserved)
    receiver.release(key)
    found, cached = tokens_of(receiver, prompt)
    assert cached == 24
    assert found == backend.expected(SequenceSpec(prompt, GREEDY))


def test_another_scope_finds_nothing(backend):
    engine, prompt = engine_of(backend), b"a secret prompt of one tenant"
    tokens, _ = tokens_of(engine, prompt, cache_scope="one")
    for scope, hit in (("two", 0), ("", 0), ("one", 28), ("two", 28)):
        assert tokens_of(engine, prompt, cache_scope=scope) == (tokens, hit)


def test_without_the_cache_blocks_are_free_at_once(backend):
    engine, prompt = engine_of(backend, prefix_cache=False), b"The quick brown fox"
    assert tokens_of(engine, prompt) == tokens_of(engine, prompt)
    assert engine.counters.cached_tokens == 0
    assert engine.pool.counts().free == 40


def test_what_runs_shares_its_blocks_and_outputs_say_what_was_cached(backend):
    engine, prompt = engine_of(backend), tuple(b"one beginning for all of them: ")
    streams, cached = dict[str, list[int]](), dict[str, int]()
    for i in range(4):
        engine.submit(HandoffId(str(i), 1), SequenceSpec((*prompt, i), GREEDY))
        if i == 0:
            engine.step()
    shared = engine.pool.counts().owned
    while engine.has_work():
        for output in engine.step().outputs:
            streams.setdefault(output.key.request_id, []).extend(token.token_id for token in output.tokens)
            cached[output.key.request_id] = output.cached_tokens
        counts = engine.pool.counts()
        assert counts.owned <= shared + 4 + 3 * 3, "the seven blocks of the beginning are counted once"
    assert cached == {"0": 0, "1": 28, "2": 28, "3": 28}
    for i in range(1, 4):
        assert streams[str(i)] == backend.expected(SequenceSpec((*prompt, i), GREEDY))
    assert engine.load().cached_tokens == 3 * 28


def test_a_full_cache_gives_way_to_a_reservation_and_to_the_next_prompt(backend):
    engine = engine_of(backend, total_blocks=8)
    tokens_of(engine, range(20))
    assert engine.pool.counts().cached == 7
    reserved = engine.reserve(31)
    assert len(reserved.blocks) == 8
    reserved.release()
    assert engine.pool.counts().free == 8
    tokens_of(engine, range(20))
    assert tokens_of(engine, range(100, 120))[1] == 0


class Flaky:
    """The oracle, which raises, or gives no numbers, as soon as it is told."""

    def __init__(self, backend):
        self.backend, self.fault = backend, None
        self.name, self.layout, self.fingerprint = backend.name, backend.layout, backend.fingerprint
        self.vocab_size, self.max_model_len, self.device = backend.vocab_size, backend.max_model_len, backend.device
        self.make_cache, self.thinker = backend.make_cache, None

    def forward(self, batch, kv):
        logits = self.backend.forward(batch, kv)
        if self.fault == "raise":
            raise RuntimeError("out of luck")
        return logits * float("nan") if self.fault else logits


@pytest.mark.parametrize("fault", ["raise", "nan"])
def test_what_a_failed_step_wrote_or_read_is_not_found(backend, fault):
    engine, prompt = engine_of(flaky := Flaky(backend)), tuple(b"The quick brown fox")
    tokens_of(engine, prompt)
    flaky.fault = fault
    engine.submit(HandoffId("r", 1), SequenceSpec((*prompt, *b" jumps"), GREEDY))
    assert len(engine.step().failed) == 1
    flaky.fault = None
    assert engine.counters.cached_tokens == 16
    assert tokens_of(engine, prompt) == (backend.expected(SequenceSpec(prompt, GREEDY)), 0)


# --- the same tokens with and without


def family(rng, vocab, scopes=("", "me")):
    """Prompts of which many begin alike, in two scopes, some of them twice."""
    stems = [tuple(rng.randrange(vocab) for _ in range(rng.randint(5, 40))) for _ in range(4)]
    for _ in range(24):
        stem = rng.choice(stems)
        prompt = (*stem[: rng.randint(1, len(stem))], *(rng.randrange(vocab) for _ in range(rng.choice([0, 0, 1, 9]))))
        length = rng.randint(1, 24)
        sampling = Sampling(max_tokens=length, temperature=rng.choice([0.0, 1.0]), seed=rng.getrandbits(60))
        yield SequenceSpec(prompt, sampling, cache_scope=rng.choice(scopes), priority=rng.choice([0, 0, 1]))


def answers(engine, specs, rng):
    """The tokens of each, arriving at random times, two of them aborted by the way and sent again."""
    streams, waiting, order = dict[int, list[int]](), list(enumerate(specs)), 0
    while waiting or engine.has_work():
        for number, spec in waiting[: rng.randint(0, 3)]:
            engine.submit(HandoffId(str(number), 1), spec)
            waiting.remove((number, spec))
            streams[number] = []
        order += 1
        for output in engine.step().outputs:
            streams[int(output.key.request_id)] += [token.token_id for token in output.tokens]
        if order in {5, 11}:
            victim = rng.choice(list(streams))
            engine.release(HandoffId(str(victim), 1))
            waiting.append((victim, specs[victim]))
    assert engine.pool.available == engine.pool.total
    return streams


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(("total_blocks", "budget"), [(200, 2048), (22, 30), (18, 5)])
def test_the_oracle_gives_the_same_tokens(backend, number, total_blocks, budget):
    """Its logits depend on every byte of KV, so stale, torn or swapped blocks show."""
    rng = random.Random(number)
    specs = list(family(rng, 256))
    engine = engine_of(backend, total_blocks, max_batched_tokens=budget)
    streams = answers(engine, specs, rng)
    assert streams == {i: backend.expected(spec) for i, spec in enumerate(specs)}
    assert engine.counters.cached_tokens > 0


@pytest.mark.parametrize("total_blocks", [300, 24])
def test_a_transformer_gives_the_same_tokens(tmp_path, total_blocks):
    random_checkpoint(tmp_path, "llama", seed=3)
    model = load_model(tmp_path, dtype="float32", device="cpu", block_size=BLOCK)
    specs = list(family(random.Random(7), VOCAB))
    found = {}
    for cache in (False, True):
        engine = engine_of(model, total_blocks, prefix_cache=cache, max_batched_tokens=40)
        found[cache] = answers(engine, specs, random.Random(8))
        assert (engine.counters.cached_tokens > 0) == cache
    assert found[True] == found[False]


def test_deterministic_requests_have_names_of_their_own():
    assert scope_key("a", "b", True) != scope_key("a", "b") == scope_key("a", "b", False)
    assert scope_key("a", "b", True) != scope_key("a", "bdeterministic")


@pytest.mark.parametrize(
    ("prompt", "known", "ordinary", "deterministic"),
    [(1, 0, 0, 0), (8, 0, 1, 1), (9, 0, 2, 2), (8, 1, 2, 2), (8, 9, 4, 2), (7, 9, 3, 1), (3, 9, 2, 0)],
)
def test_blocks_of_output_tokens_have_no_names_if_bits_count(prompt, known, ordinary, deterministic):
    spec = SequenceSpec(tuple(range(prompt)), Sampling(), tuple(range(known)))
    assert named_blocks(spec, 4) == ordinary
    assert named_blocks(replace(spec, deterministic=True), 4) == deterministic


@pytest.mark.parametrize("thinks", [True, False])
def test_blocks_behind_the_prompt_have_names_if_they_are_thought_about_or_nothing_is(thinks):
    spec = SequenceSpec(tuple(range(8)), Sampling(), tuple(range(9)))
    assert named_blocks(spec, 4, thinks=thinks) == (2 if thinks else 4)
    assert named_blocks(replace(spec, think_while_decoding=True), 4, thinks=thinks) == 4
    exact = replace(spec, deterministic=True)
    assert named_blocks(exact, 4, thinks=thinks) == 2
    chain = Chain(scope_key("a", "b", True), spec.tokens, 4)
    names = names_of(replace(exact, cache_scope="b"), "a", 4, thinks=thinks)
    assert list(names) == [chain.digest(0), chain.digest(1)]
