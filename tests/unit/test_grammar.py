"""Constraints in clients' form, and as grammars over a model's tokens."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tokenizers

from baton.core import Constraint
from baton.errors import InvalidRequest
from baton.limits import MAX_CHOICE_CHARS, MAX_CHOICE_TEXTS, MAX_GRAMMAR_BYTES, MAX_REGEX_BYTES, MAX_SCHEMA_BYTES
from baton.structured_output import Grammars
from baton.tokenizer import ORACLE_EOS, OracleTokenizer, load_tokenizer
from tests.unit.test_tokenizer import save_bpe


def schema(value: object) -> Constraint:
    return Constraint("json_schema", (json.dumps(value),))


def regex(text: str) -> Constraint:
    return Constraint("regex", (text,))


def grammar(text: str) -> Constraint:
    return Constraint("grammar", (text,))


def choices(*texts: str) -> Constraint:
    return Constraint("choices", texts)


LARK = 'start: NUMBER ("+" NUMBER){0,2}\nNUMBER: /[1-9][0-9]?/\n'
GBNF = 'root ::= number ("+" number){0,2}\nnumber ::= [1-9] [0-9]?\n'


@pytest.fixture(scope="module")
def oracle():
    return Grammars(OracleTokenizer())


@pytest.fixture(scope="module", params=["oracle", "bpe"])
def tokenizer(request, tmp_path_factory):
    if request.param == "oracle":
        return OracleTokenizer()
    return load_tokenizer(save_bpe(tmp_path_factory.mktemp("bpe"), eos=1))


def allowed(guide) -> list[int]:
    bits = np.full(guide.words, -1, dtype=np.int32)
    guide.fill(bits)
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


def after(grammars: Grammars, constraint: Constraint, text: str):
    guide = grammars.start(constraint)
    assert guide is not None
    for token in text.encode():
        guide.advance(token)
    return guide


TEXTS = ('a "quoted" \\ word\n', "<|end|> /x/", "é\t漢", "é\tb", "start: a | b")


@pytest.mark.parametrize("text", TEXTS)
def test_each_choice_may_be_written_however_it_is_split(tokenizer, text):
    grammars = Grammars(tokenizer)
    guide = grammars.start(choices(*TEXTS))
    assert guide is not None
    for token in tokenizer.encode(text):
        assert not guide.complete
        assert token in allowed(guide)
        guide.advance(token)
    assert guide.complete
    assert set(allowed(guide)) == set(tokenizer.eos_ids)


def test_only_what_can_follow_is_allowed(oracle):
    words = choices("in", "into", "on")
    assert allowed(after(oracle, words, "")) == [ord("i"), ord("o")]
    assert allowed(after(oracle, words, "in")) == [ord("t"), ORACLE_EOS]
    assert [after(oracle, words, text).complete for text in ("in", "on", "int", "into")] == [False, True, False, True]


def test_a_regex_is_of_all_the_text(oracle):
    assert allowed(after(oracle, regex("b[0-2]{2}"), "")) == [ord("b")]
    assert allowed(after(oracle, regex("b[0-2]{2}"), "b1")) == [ord(digit) for digit in "012"]
    assert after(oracle, regex("b[0-2]{2}"), "b11").complete


@pytest.mark.parametrize("text", [LARK, GBNF])
def test_a_grammar_is_read_in_both_syntaxes(oracle, text):
    assert allowed(after(oracle, grammar(text), "")) == [ord(digit) for digit in "123456789"]
    assert allowed(after(oracle, grammar(text), "12")) == [ord("+"), ORACLE_EOS]
    assert after(oracle, grammar(text), "1+x").broken


def test_json_may_have_a_space_between_tokens_unless_the_schema_says_more(oracle):
    closed = {"required": ["a"], "additionalProperties": False}
    wanted: dict[str, object] = {"type": "object", "properties": {"a": {"type": "integer"}}, **closed}
    for text, right in (('{"a":1}', True), ('{ "a": 1 }', True), ('{  "a":1}', False), ('{\n"a":1}', False)):
        assert after(oracle, schema(wanted), text).complete is right, text
    pretty = wanted | {"x-guidance": {"whitespace_pattern": "[ \\n]*"}}
    assert after(oracle, schema(pretty), '{\n  "a":  1\n}').complete


WANTED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("constraint", "answer"),
    [
        (choices("in", 'a"b'), 'a"b'),
        (regex(r"a/b\/[\d]"), "a/b/1"),
        (schema(WANTED), '{"a": 1}'),
        (grammar(LARK), "2+1+10"),
        (grammar(GBNF), "2+1+10"),
        (schema(WANTED | {"x-guidance": 1}), '{"a": 1}'),
    ],
)
@pytest.mark.parametrize("token", [True, False])
def test_a_constraint_holds_after_a_free_text(tmp_path, constraint, answer, token):
    """The mark is one token of the model, or else a text."""
    save_bpe(tmp_path, eos=1)
    if token:
        listed = {"300": {"content": "</think>", "special": False}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    tokenizer = load_tokenizer(tmp_path)
    guide = Grammars(tokenizer).start(replace(constraint, after=("</think>", "[/THINK]")))
    assert guide is not None
    for each in tokenizer.encode('Hm, {"a": x'):
        guide.advance(each)
    assert not set(tokenizer.eos_ids) & set(allowed(guide)), "a thought is no answer"
    for each in tokenizer.encode(f".</think>\n\n{answer}"):
        assert each in allowed(guide)
        guide.advance(each)
    assert guide.complete
    assert set(allowed(guide)) == set(tokenizer.eos_ids)


def test_what_is_not_allowed_breaks_it_and_nothing_may_follow(oracle):
    guide = after(oracle, choices("in"), "x")
    assert guide.broken
    assert not guide.complete
    assert allowed(guide) == []
    guide.advance(ord("i"))
    assert allowed(guide) == []


NINE = [{"type": "string", "pattern": f".*w{i}.*"} for i in range(9)]
CHAIN = {f"a/{i}": NINE[i] | ({"$ref": f"#/$defs/a~1{i + 1}"} if i < 8 else {}) for i in range(9)}
ANCHORED = {f"{i}": NINE[i] | {"$anchor": f"a{i}"} for i in range(9)}
PATTERNS = [  # nine that meet: with twenty-five the router would search for hours
    {"allOf": NINE},
    {"allOf": [{"anyOf": [{"type": "integer"}, text]} for text in NINE]},
    {"allOf": [{"type": "array", "minItems": 1, "items": text} for text in NINE]},
    {"allOf": [{"type": "object", "properties": {"k": text}, "required": ["k"]} for text in NINE]},
    {"allOf": [{"type": "object", "additionalProperties": text, "minProperties": 1} for text in NINE]},
    {"$defs": CHAIN, "properties": {"pattern": {"$ref": "#/$defs/a~10"}}},
    {"$defs": {"t": {"allOf": NINE[:5]}, "u": {"allOf": [{"$ref": "#/$defs/t"}, *NINE[5:]]}}, "$ref": "#/$defs/u"},
    {"items": [{"allOf": NINE}]},
    {"$defs": ANCHORED, "allOf": [{"$ref": f"#a{i}"} for i in range(9)]},
    {"items": {"$id": "x", "$defs": {"a": {"allOf": NINE}}, "$ref": "#/$defs/a"}},
]
SEPARATE = {  # 34 each, which apply to the same object
    "$defs": {f"d{i}": {"patternProperties": {f"^{i}{j}_": {} for j in range(34)}} for i in range(3)},
    "type": "object",
    "allOf": [{"$ref": f"#/$defs/d{i}"} for i in range(3)],
}
DEEP = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1200)} | {"d1200": {"allOf": NINE}}
# Each alternative is an object of 101 properties, which are not in the text of the schema.
MERGED = {
    "$defs": {"d": {"properties": {f"k{i}": {} for i in range(100)}}},
    "anyOf": [
        {"type": "object", "allOf": [{"$ref": "#/$defs/d"}], "properties": {"k": {"const": i}}} for i in range(50)
    ],
}
CHOSEN = {
    "type": "object",
    "properties": {str(i): {} for i in range(150)},
    "anyOf": [{"required": [f"{i}"]} for i in range(150)],
}
WRONG = [
    (schema({"type": "objct"}), "Invalid type: objct"),
    (schema([1]), "must be a JSON object"),
    (schema(False), "must be a JSON object"),
    (schema({"allOf": [False]}), "Unsatisfiable schema"),
    (schema({"type": "integer", "minimum": 2, "maximum": 1}), "Unsatisfiable schema"),
    (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    (schema({"$ref": "http://example.org/schema"}), "not present"),
    (schema({"type": "integer", "multipleOf": 10**9 + 7}), "multipleOf: their least common multiple"),
    (schema({"type": "number", "multipleOf": 9973.000001}), "multipleOf: their least common multiple"),
    (schema({"items": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}}), "multipleOf: their least"),
    (schema({"allOf": [{"multipleOf": 3}, {"multipleOf": 1e-9}]}), "multipleOf: their least common multiple"),
    (schema({"multipleOf": 1e308}), "multipleOf: their least common multiple"),
    (schema({"multipleOf": float("inf")}), "multipleOf: their least common multiple"),
    *((schema(many), "pattern, format: at most 8 together") for many in PATTERNS),
    (schema({"$defs": DEEP, "$ref": "#/$defs/d0"}), "its nesting or its references are too deep"),
    (schema({"$ref": "#"}), "no text can match it"),
    (schema({"properties": {str(i): {} for i in range(3000)}}), "it is too complex"),
    (schema({"patternProperties": {f"^a{i}_": {} for i in range(101)}}), "patternProperties: at most 100 together"),
    (schema(SEPARATE), "patternProperties: at most 100 together for one object, got 102"),
    (schema(MERGED), "it is too complex"),
    (schema(CHOSEN), "it is too complex"),
    (Constraint("json_schema", ("{",)), "must be a JSON object"),
    (Constraint("json_schema", ('{"allOf": [' * 3000 + "{}" + "]}" * 3000,)), "must be a JSON object"),
    (Constraint("json_schema", ('{"allOf": [' * 300 + "{}" + "]}" * 300,)), "recursion limit exceeded"),
    (grammar('start: "a" x'), 'unknown name: "x"'),
    (grammar('root ::= "a" x'), "Rule 'x' not found"),
    (grammar("root ::= " + "(" * 5000 + '"a"' + ")" * 5000), "its nesting is too deep"),
    (grammar('start: "'), "lexer error"),
    (grammar('start: %json {"allOf": [{}]}'), "must not contain %json"),
    (grammar("start: A\nA: " + "&".join(f"/.*w{i}.*/" for i in range(10))), "& and ~: at most 8 together, got 9"),
    (grammar("start: A\nA: " + "|".join(f"~/.*w{i}.*/" for i in range(9))), "& and ~: at most 8 together, got 9"),
    (grammar("\n".join(f'r{i} ::= "a"' for i in range(257))), "at most 256 rules, got 257"),
    (grammar("start: start"), "no text can match it"),
    (grammar("start: " + '"a"? ' * 2000), "at most 2000 names, expressions, numbers and operators, got 2001"),
    (grammar("start: " + '"//" a ' * 2000 + '\na: "a"?'), "at most 2000 names, expressions"),  # no comment
    (grammar("start: " + '/"/ a "/" ' * 1000 + '\na: "a"?'), "at most 2000 names, expressions"),
    (grammar("start: " + '"a" ' * 5100), "grammar size (number of symbols) too big"),
    (regex("a("), "unclosed group"),
    (regex("(?=a)b"), "look-around"),
    (regex(r"(a)\1"), "backreferences are not supported"),
    (regex(r"[^\s\S]"), "no text can match it"),
]


@pytest.mark.parametrize(("constraint", "words"), WRONG)
def test_what_cannot_be_matched_is_refused(oracle, constraint, words):
    with pytest.raises(InvalidRequest) as caught:
        oracle.check(constraint)
    [violation] = caught.value.violations
    assert violation.field == f"constraint.{constraint.kind}"
    assert words in violation.description
    assert len(violation.description) <= 300
    assert "\n" not in violation.description


@pytest.mark.parametrize(
    ("kind", "texts", "words"),
    [
        ("json_schema", ("",), "1 to 65536 bytes, got 0"),
        ("json_schema", ("é" * (MAX_SCHEMA_BYTES // 2 + 1),), "got 65538"),
        ("regex", ("",), "1 to 8192 bytes, got 0"),
        ("regex", ("x" * (MAX_REGEX_BYTES + 1),), "1 to 8192 bytes, got 8193"),
        ("grammar", ("x" * (MAX_GRAMMAR_BYTES + 1),), "1 to 65536 bytes, got 65537"),
        ("choices", (), "1 to 256, got 0"),
        ("choices", ("x",) * (MAX_CHOICE_TEXTS + 1), "1 to 256, got 257"),
        ("choices", ("a", ""), "1 to 1024 characters"),
        ("choices", ("x" * (MAX_CHOICE_CHARS + 1),), "1 to 1024 characters"),
    ],
)
def test_sizes_are_bounded(kind, texts, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        Constraint(kind, texts)
    assert caught.value.violations[0].field == f"constraint.{kind}"


def test_the_largest_that_may_be_asked_for_are_compiled(oracle):
    oracle.check(choices(*(f"{i:03}" + "x" * (MAX_CHOICE_CHARS - 3) for i in range(MAX_CHOICE_TEXTS))))
    oracle.check(regex("(ab|[^c]x?)" * (MAX_REGEX_BYTES // 11)))
    many = grammar("root ::= " + " | ".join(f'"{i:05}"' for i in range(5000)))
    assert after(oracle, many, "04999").complete
    oracle.check(grammar("start: A\nA: " + "&".join(f"/.*w{i}.*/" for i in range(9))))
    names = {f"n{i}": {"type": "string", "pattern": f"^[a-z]{{{i},9999}}$"} for i in range(1000)}
    oracle.check(schema({"type": "object", "properties": names}))
    for keys in (500, 2000):  # any value
        wide = schema({"type": "object", "properties": {f"n{i}": {} for i in range(keys)}})
        assert after(oracle, wide, '{"n3":[1],"n400":{"b":2},"x":3}').complete, keys


def test_parts_that_cost_no_state_much_are_not_counted(oracle):
    names: dict[str, dict[str, object]] = {f"n{i}": {} for i in range(2500)}
    oracle.check(schema({"type": "object", "properties": names, "required": list(names)}))
    unused = {"$defs": {"unused": {"properties": names}}, "default": {"anyOf": [0] * 3000}}
    oracle.check(schema({"type": "object", **unused}))
    oracle.check(schema({"anyOf": [{"const": name} for name in names]}))
    few = {"type": "object", "patternProperties": {f"^{i}-": {} for i in range(2)}}
    other = {"type": "object", "patternProperties": {f"^{i}_": {} for i in range(99)}}
    oracle.check(schema({"type": "object", "properties": {"a": few, "b": other}}))
    oracle.check(schema({"type": "object", "properties": {f"n{i}": few for i in range(60)}}))


def test_numbers_may_be_multiples(oracle):
    wanted = {"type": "object", "properties": {"a": {"multipleOf": 0.01}, "b": {"multipleOf": 12}}}
    oracle.check(schema(wanted))
    twelves = schema({"type": "integer", "multipleOf": 12})
    assert ORACLE_EOS in allowed(after(oracle, twelves, "144"))
    assert ORACLE_EOS not in allowed(after(oracle, twelves, "145"))
    oracle.check(schema({"type": "number", "multipleOf": 1e-9}))


def test_patterns_that_do_not_meet_are_not_counted_together(oracle):
    word = {"type": "string", "pattern": "^[a-z]+$", "minLength": 1}
    many = {f"k{i}": word for i in range(20)}
    oracle.check(schema({"type": "object", "properties": many, "additionalProperties": False}))
    oracle.check(schema({"anyOf": [word | {"pattern": f"^{i}"} for i in range(20)]}))
    oracle.check(schema({"enum": [{"pattern": "a", "allOf": NINE}]}))
    tree = {"type": "object", "properties": {"name": word, "next": {"$ref": "#/$defs/tree"}}}
    oracle.check(schema({"$defs": {"tree": tree}, "allOf": [{"$ref": "#/$defs/tree"}]}))


def test_known_tokens_must_be_a_beginning(oracle):
    words = choices("in", "into")
    oracle.check_known(words, [b"", b"in", b"into"])
    for known in (b"x", b"intox", (105, ORACLE_EOS)):
        with pytest.raises(InvalidRequest, match=r"constraint.choices: does not allow the tokens"):
            oracle.check_known(words, [b"in", known])


def test_grammars_are_compiled_once_and_used_apart():
    oracle = Grammars(OracleTokenizer())
    first, second = oracle.start(choices("abc")), oracle.start(choices("abc"))
    assert first is not None
    oracle.check(choices("abc"))
    assert (oracle._compiled.cache_info().misses, oracle._compiled.cache_info().hits) == (1, 2)
    first.advance(ord("a"))
    assert (allowed(first), allowed(second)) == ([ord("b")], [ord("a")])
    assert oracle.start(None) is None
    oracle.check(None)


def test_a_model_without_an_end_token_and_a_tokenizer_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="constraint: the model has no end token"):
        Grammars(load_tokenizer(save_bpe(tmp_path))).check(choices("a"))
    save_bpe(tmp_path, eos=1)
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    raw.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidRequest, match="constraint: constraints are not possible with this model's tokenizer"):
        Grammars(load_tokenizer(tmp_path)).check(choices("a"))


def test_logits_may_be_wider_than_the_vocabulary():
    guide = Grammars(OracleTokenizer(), 320).start(regex("[^a]*"))
    assert max(allowed(guide)) == ORACLE_EOS
