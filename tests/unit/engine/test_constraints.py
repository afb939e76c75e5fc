"""Answers with constraints, by the oracle: from the first token to the end, also after any interruption."""

import json
import random
import re
from collections import defaultdict
from copy import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core import Constraint, FinishReason, Sampling
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.engine import BROKEN, NO_TOKEN
from baton.engine.prefix_cache import BlockHashChain, scope_key
from baton.engine.sampling.logits import Row
from baton.engine.sampling.sampler import Sampler
from baton.errors import InvalidRequest
from baton.structured_output import Grammars, Guide
from baton.tokenizer import ORACLE_EOS, OracleTokenizer
from baton.worker.engine_factory import generate
from tests.support import engines
from tests.support.engines import hand_over, ids, key_of, move, oracle, run


def integers(low, size):
    return {"type": "integer", "minimum": low, "maximum": low + size}


def arrays(items, low, more):
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + more}


def objects(fields, required):
    named = {"properties": fields, "required": sorted(fields)[:required], "additionalProperties": False}
    return {"type": "object", **named}


PERSON = objects({"age": integers(0, 99), "name": {"type": "string", "maxLength": 8}}, 2)
KINDS = {
    "json": Constraint("json_schema", (json.dumps(PERSON),)),
    "regex": Constraint("regex", ("[a-f]{3,9}(-[0-9]{2}){2}",)),
    "choices": Constraint("choices", ("yes", "yesterday", "no", "Zoë")),
    "grammar": Constraint("grammar", ('root ::= ("x" | "(" root ")") [0-9]{1,3}\n',)),
}
engine_of = partial(engines.engine_of, total_blocks=256)


@pytest.fixture(scope="module")
def backend():
    return oracle(max_model_len=1024)


def spec_of(constraint, **options):
    usual = {"max_tokens": 500, "temperature": 1.0, "seed": 3, "ignore_eos": False}
    return engines.spec_of("write: ", constraint=constraint, **usual | options)


def fits(kind: str, text: str) -> bool:
    if kind == "json":
        jsonschema.validate(json.loads(text), PERSON)
        return True
    if kind == "grammar":
        inner = text.lstrip("(")
        return re.fullmatch(r"x\d{1,3}" + r"\)\d{1,3}" * (len(text) - len(inner)), inner) is not None
    texts = KINDS[kind].texts
    return re.fullmatch(texts[0], text) is not None if kind == "regex" else text in texts


VARIANTS = [
    {"temperature": 0.0},
    {"seed": 5},
    {"seed": 6, "temperature": 1.5, "top_p": 0.5},
    {"seed": 7, "top_k": 3, "logprobs": 2},
    {"seed": 8, "min_p": 0.3, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"seed": 9, "logit_bias": ((ord("x"), 100.0), (ORACLE_EOS, -100.0))},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_match(backend, kind, variant):
    spec = spec_of(KINDS[kind], **variant)
    found = generate(engine_of(backend), spec)
    assert found.finish.reason is FinishReason.EOS
    assert fits(kind, found.text)
    assert ids(found.tokens) == backend.expected(spec)


@pytest.mark.parametrize("kind", KINDS)
def test_going_on_from_any_token_gives_the_same(backend, kind):
    engine = engine_of(backend)
    spec = spec_of(KINDS[kind], seed=11)
    whole = generate(engine, spec)
    for known in range(len(whole.tokens)):
        rest = generate(engine, replace(spec, known=tuple(ids(whole.tokens[:known]))))
        assert rest.tokens == whole.tokens[known:], known
        assert rest.finish == whole.finish
    finish = engine.finish_of(replace(spec, known=tuple(ids(whole.tokens))))
    assert (finish is not None) is (whole.finish.matched == "")  # otherwise the end token must still be drawn


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0, 1, 4])
def test_a_handoff_at_any_token_gives_the_same(backend, kind, length):
    sender, receiver = engine_of(backend), engine_of(backend)
    spec = spec_of(KINDS[kind], seed=12)
    whole = generate(sender, spec).tokens
    known = whole[: min(length, len(whole) - 2)]
    found = hand_over(sender, receiver, replace(spec, known=tuple(ids(known))))
    assert found.tokens[key_of()] == whole[len(known) :]


@pytest.mark.parametrize("kind", KINDS)
def test_a_move_in_the_middle_gives_the_same(backend, kind):
    spec = spec_of(KINDS[kind], seed=12)
    whole = generate(engine_of(backend), spec).tokens
    found = move(engine_of(backend), engine_of(backend), spec, max(1, len(whole) // 2))
    assert found.tokens[key_of()] == whole


def test_beside_others_and_through_preemptions_each_answer_is_its_own(backend, seed):
    """The pool is too small for all. Every second request has no constraint."""
    rng = random.Random(seed)
    engine = engine_of(backend, total_blocks=20, max_batched_tokens=16)
    specs = {}
    for number in range(12):
        constraint = rng.choice([*KINDS.values(), Constraint("regex", ("[a-z]{40}",))]) if number % 2 else None
        some = {"temperature": rng.choice([0.0, 1.0]), "ignore_eos": constraint is None}
        specs[key_of(number)] = spec_of(constraint, seed=rng.getrandbits(32), max_tokens=60, **some)
    found = run(engine, specs)
    assert engine.counters.preemptions > 0
    assert {key: found.ids(key) for key in specs} == {key: backend.expected(spec) for key, spec in specs.items()}


@pytest.mark.parametrize(
    ("constraint", "sampling", "text", "reason"),
    [
        (Constraint("choices", ("no",)), {"max_tokens": 2}, "no", FinishReason.EOS),  # complete without an end token
        (Constraint("regex", ("x{9}",)), {"max_tokens": 4}, "xxxx", FinishReason.LENGTH),
        (Constraint("choices", ("abcd",)), {"stop": ("c",)}, "ab", FinishReason.STOP_STRING),
    ],
)
def test_how_an_answer_ends(backend, constraint, sampling, text, reason):
    found = generate(engine_of(backend), spec_of(constraint, **sampling))
    assert (found.text, found.finish.reason) == (text, reason)
    assert reason is not FinishReason.EOS or bytes(ids(found.tokens)) == text.encode()


def test_what_an_engine_can_never_compute_is_refused(backend):
    engine = engine_of(backend)
    for spec, message in (
        (spec_of(Constraint("regex", ("(",))), r"constraint\.regex: unclosed group"),
        (spec_of(KINDS["choices"], known=tuple(b"maybe")), "known: has tokens that the constraint does not allow"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            engine.submit(key_of(), spec)
    assert not engine.has_work()


def test_a_constraint_that_leaves_nothing_ends_its_own_request_alone(backend):
    """Until `min_tokens` the end token is barred. The router rejects that; in a worker, only this request fails."""
    engine = engine_of(backend)
    for name, spec in (
        ("bad", spec_of(Constraint("regex", ("(ab)?",)), min_tokens=400, logit_bias=((ord("a"), -100.0),))),
        ("worse", spec_of(Constraint("choices", ("ab", "abc")), min_tokens=400, stop_token_ids=(ord("c"),))),
        ("good", spec_of(KINDS["regex"])),
    ):
        engine.submit(key_of(name), spec)
    failed, text = [], ""
    while engine.has_work():
        result = engine.step()
        failed += [key.request_id for key, _ in result.failed]
        text += "".join(token.text for o in result.outputs if o.key.request_id == "good" for token in o.tokens)
    assert failed == ["worse"]
    assert fits("regex", text)


class Breaking(Guide):
    """A guide that allows all tokens, until it breaks after some. If `late`, the next mask breaks it."""

    def __init__(self, after: int, *, late: bool) -> None:
        self.left, self.late, self.words, self.broken = after, late, 9, False

    def copy(self):
        return copy(self)

    @property
    def complete(self):
        return False

    def advance(self, token_id):
        self.left -= 1
        self.broken = self.left <= 0 and not self.late

    def fill(self, allowed):
        self.broken = self.broken or self.left <= 0
        allowed[:] = 0 if self.broken else -1


def breaking(engine, *, late=True):
    """Let each constraint of an engine, of one number, break after so many tokens."""

    def start(constraint):
        return None if constraint is None else Breaking(int(constraint.texts[0]), late=late)

    engine._factory.choices._grammars = SimpleNamespace(check=lambda constraint: None, start=start)
    return engine


def constrained(after, prompt="abc", **options):
    return engines.spec_of(prompt, **{"constraint": Constraint("regex", (str(after),)), "max_tokens": 40} | options)


def ended(engine, specs):
    """Run `specs`. Return the tokens of each, and the texts of errors by number."""
    tokens, failed = defaultdict[int, list[int]](list), dict[int, str]()
    for number, spec in enumerate(specs):
        engine.submit(key_of(number), spec)
    while engine.has_work():
        result = engine.step()
        for output in result.outputs:
            tokens[int(output.key.request_id)] += ids(output.tokens)
        for key, fault in result.failed:
            failed[int(key.request_id)] = str(fault)
    assert engine.pool.counts().owned == 0
    return [tokens[number] for number in range(len(specs))], failed


SHAPES = {
    "exact": FixedShapes(4, 8, exact_rows=64),
    "everywhere": FixedShapes(4, 8, everywhere=True),
    "2": FixedShapes(16, 2),
    "8": FixedShapes(4, 8),
    "32": FixedShapes(1, 32),
    "ragged": FixedShapes(2, 16, ragged=True),
}


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("shapes", SHAPES)
def test_all_tokens_before_a_break_are_delivered_whatever_computes_them(backend, shapes, late):
    """Alone, and with company."""
    lengths = (1, 2, 3, 7, 8, 9, 20, 33)
    specs = [constrained(after, "x" * after, deterministic=True) for after in lengths]
    wanted = [backend.expected(engines.spec_of("x" * after, max_tokens=after)) for after in lengths]
    for first, some in [(0, specs), *((number, [spec]) for number, spec in enumerate(specs))]:
        engine = breaking(engine_of(backend, shapes=SHAPES[shapes]), late=late)
        assert ended(engine, some) == (wanted[first : first + len(some)], dict.fromkeys(range(len(some)), BROKEN))
        assert (engine.counters.rollbacks, engine.counters.recomputed_tokens) == (0, 0)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_break_leaves_the_shared_prefix_in_the_cache(monkeypatch, deterministic):
    """The KV is right. It is in doubt if the logits are no numbers."""
    backend, prompt = oracle(max_model_len=512), "p" * 256  # two chunks of the grid
    engine, forward = breaking(engine_of(backend, shapes=SHAPES["8"])), backend.forward
    plain = engines.spec_of(prompt, deterministic=deterministic)
    ended(engine, [plain])
    chain = BlockHashChain(scope_key(backend.fingerprint, "", deterministic), plain.prompt, engines.BLOCK)
    names = chain.digests(0, len(prompt) // engines.BLOCK)
    found = engine.pool.find(names)
    assert len(found) == len(names)
    assert ended(engine, [constrained(0, prompt + "x", deterministic=deterministic)]) == ([[]], {0: BROKEN})
    assert engine.pool.find(names) == found
    monkeypatch.setattr(backend, "forward", lambda batch, kv: forward(batch, kv) * torch.nan)
    assert ended(engine, [constrained(9, prompt + "x", deterministic=deterministic)]) == ([[]], {0: NO_TOKEN})
    assert engine.pool.find(names) == []


def test_rows_without_a_constraint_are_left_as_they_are():
    """The samples are equal bit for bit, and the logits are not modified."""
    logits = torch.randn(3, 257, generator=torch.Generator().manual_seed(1))
    before, grammars = logits.clone(), Grammars(OracleTokenizer())

    def row(guide=None, **sampling):
        return Row(tuple(b"write: "), Sampling(**{"seed": 1, "logprobs": 1} | sampling), (ORACLE_EOS,), 257, guide)

    plain = Sampler().sample(logits, [row(), row(temperature=0.0), row(top_p=0.5)])
    guide = grammars.start(Constraint("choices", ("q", "r")))
    mixed = Sampler().sample(logits, [row(), row(guide, temperature=0.0), row(top_p=0.5)])
    assert (mixed[0], mixed[2]) == (plain[0], plain[2])
    best = max(b"qr", key=lambda token: logits[1, token])
    assert mixed[1].token_id == best
    assert mixed[1].logprobs is not None
    assert mixed[1].logprobs.logprob == pytest.approx(logits[1].log_softmax(-1)[best].item())
    assert torch.equal(logits, before)


# llguidance counts in 64-bit floats: beyond 2^53 it uses a neighboring number.
values = st.one_of(st.text(max_size=4), st.integers(-(2**53), 2**53), st.none())
scalars = st.one_of(
    st.builds(integers, st.integers(-50, 50), st.integers(0, 99)),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 6)),
    st.builds(lambda some: {"enum": some}, st.lists(values, min_size=1, max_size=4)),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": {"a": [1]}}]),
    st.just({"type": "string", "pattern": "^[a-c]{1,4}$"}),
)


def composed(inner):
    fields = st.dictionaries(st.sampled_from(["a", "b", 'q"', "é"]), inner, max_size=3)
    few = st.integers(0, 2)
    return st.one_of(
        st.builds(arrays, inner, few, few),
        st.builds(objects, fields, st.integers(0, 3)),
        st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner),
    )


@given(st.recursive(scalars, composed, max_leaves=5), st.integers(0, 2**32), st.sampled_from([0.0, 1.0]))
@pytest.mark.slow
@settings(max_examples=40, deadline=None)
def test_answers_to_random_schemas_parse_and_are_valid(schema, seed, temperature):
    spec = spec_of(Constraint("json_schema", (json.dumps(schema),)), seed=seed, temperature=temperature, max_tokens=900)
    found = generate(engine_of(oracle(block_size=16, max_model_len=1024), total_blocks=64), spec)
    assert found.finish.reason is FinishReason.EOS, found.text
    jsonschema.validate(json.loads(found.text), schema)
