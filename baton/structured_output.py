"""Constraints as grammars over a model's tokens: the allowed next tokens, and whether an answer is complete.

llguidance does the work and limits the cost of a grammar, at compile time and in each step. It is loaded with the first
constraint. No torch: the router uses this to reject constraints that a worker could not compute.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cached_property, lru_cache
from math import lcm
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from baton.core import Constraint
from baton.errors import InvalidRequest
from baton.limits import (
    MAX_GRAMMAR_OPERATORS,
    MAX_GRAMMAR_PARTS,
    MAX_GRAMMAR_RULES,
    MAX_NAME_PATTERNS,
    MAX_SCHEMA_MULTIPLE,
    MAX_SCHEMA_PATTERNS,
)
from baton.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    Bits = np.ndarray[Any, np.dtype[np.int32]]

COMPILED = 64  # grammars that are kept
# Between JSON tokens, unless the schema differs (`x-guidance`): confused models would write only whitespace.
_WHITESPACE = " ?"
_MAX_REASON_CHARS = 300
_COMPLEX = "it is too complex"
# Limits of llguidance for grammars of clients. It holds the GIL, also in steps of a worker. The time of a parser state
# rises with the square of its items if many parts may be empty, and a mask with the states that it visits.
# Measured on an AMD EPYC on 2026-11-27, with a vocabulary of 32,000 and these limits and MAX_GRAMMAR_PARTS: the worst
# grammars took 20 to 60 ms of CPU for a mask or a token. One of 290 different repetitions {n} took 130 ms.
_GRAMMAR_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 100_000,  # a tenth of the default, with which a rejection takes 8 s
    "max_grammar_size": 5_100,  # symbols
    "max_items_in_row": 6_000,  # of a state. The default, 2,000, breaks 5,000 alternatives after their first token
    "step_max_items": 10_000,  # of the states of one mask; a fifth of the default
}
# A state of an object has four items for each property that may follow: 8,007 for 2,000. Such a step took up to 115 ms
# of CPU on an AMD EPYC on 2026-11-28: 46 to 70 for the mask, 31 to 45 for the token.
_SCHEMA_LIMITS: dict[str, Any] = {"max_items_in_row": 10_000}
# A text, a comment, or another part of a grammar in Lark's syntax.
_PARTS = re.compile(r'"(?:\\.|[^"\\\n])*"|(?://|#)[^\n]*|(/(?:\\.|[^/\\])+/|[\w-]+|[?*+~(\[{])')
_MAX_PLACES = 20
# Keywords without schemas that apply.
_NO_SCHEMAS = frozenset({"$defs", "definitions", "const", "enum", "default", "examples"})
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties"})
_PATTERN_KEYS = frozenset({"pattern", "format"})
_IN_SLASHES = re.compile(r"\\.|[/\n]", re.DOTALL)
_BASE_KEYS = frozenset({"$id", "id"})  # with these, references do not start at the root
_Patterns = Callable[[dict[str, Any]], set[str]]  # of one schema, without those in it


class Guide:
    """State of one answer in its grammar. It is `broken` after a disallowed token or a step that cost too much."""

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher, self.words = matcher, words
        self.broken = False

    def copy(self) -> Guide:
        other = Guide(self._matcher.deep_copy(), self.words)
        other.broken = self.broken
        return other

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""
        return not self.broken and self._matcher.is_stopped()

    def advance(self, token_id: int) -> None:
        self.broken = self.broken or not self._matcher.consume_token(token_id)

    def fill(self, allowed: Bits) -> None:
        """Write the allowed next tokens, end tokens included, as int32 bits `[words]`, contiguous, lowest bit first."""
        if not self.broken:
            self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
            self.broken = self._matcher.is_error()
        if self.broken:
            allowed[:] = 0


class Grammars:
    """Compiled grammars of one model's tokenizer; the most recently used are kept. Thread-safe, unlike a `Guide`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int = 0) -> None:
        self._source = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)  # logits may have more columns than there are ids
        self._compiled = lru_cache(COMPILED)(self._compile)

    def check(self, constraint: Constraint | None) -> None:
        """Raise InvalidRequest, naming the field, if it is no valid schema or expression, or matches nothing."""
        if constraint is not None:
            self._compiled(constraint)

    def start(self, constraint: Constraint | None) -> Guide | None:
        """Return the guide for a new answer; None if unconstrained. Raises InvalidRequest like `check`."""
        return None if constraint is None else self._guide(self._compiled(constraint))

    def _guide(self, matcher: LLMatcher) -> Guide:
        return Guide(matcher.deep_copy(), -(-self._tokenizer.vocab_size // 32))

    def check_known(self, constraint: Constraint, known: Iterable[Sequence[int]]) -> None:
        """Raise InvalidRequest unless an answer may begin with each of `known`."""
        for ids in known:
            if self._compiled(constraint).deep_copy().try_consume_tokens(list(ids)) < len(ids):
                raise constraint.refused("does not allow the tokens that the answer already has")

    def _compile(self, constraint: Constraint) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        given = _GRAMMAR_LIMITS if constraint.kind == "grammar" else _SCHEMA_LIMITS
        limits = LLParserLimits(verbose_errors=False, **given)  # errors are logged; requested text never is
        grammar = _grammar(constraint)
        if constraint.after:
            marks = {mark: self._source.token_id(mark) for mark in constraint.after}
            grammar = LLMatcher.grammar_from_lark(_after_free_text(constraint, marks))
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise constraint.refused(_reason(matcher.get_error()))
        first = self._guide(matcher)
        first.fill(allowed := np.zeros(first.words, dtype=np.int32))
        if not allowed.any():
            raise constraint.refused("no text can match it, or it is too complex")
        if constraint.kind == "json_schema" and self._breaks_within(matcher.deep_copy()):
            raise constraint.refused(_COMPLEX)
        return matcher

    def _breaks_within(self, matcher: LLMatcher) -> bool:
        """Return whether an object cannot go on after its beginning. Merged schemas have more parts than the text."""
        matcher.try_consume_tokens(self._tokenizer.tokenize_str("{"))
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher.is_error()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        found, ends = self._source.vocabulary(), list(self._source.eos_ids)
        if not ends:
            raise InvalidRequest.of("constraint", "the model has no end token, which constraints need")
        source = found if isinstance(found, str) else TokenizerWrapper(_Bytes(found, ends[0], self._source.encode))
        try:
            return LLTokenizer(source, n_vocab=self._vocab_size, eos_token=ends)
        except ValueError as error:
            text = f"constraints are not possible with this model's tokenizer: {_reason(str(error))}"
            raise InvalidRequest.of("constraint", text) from error


class _Bytes:
    """A vocabulary in llguidance's form, for tokenizers that it cannot read itself."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], end: int, encode: Callable[[str], list[int]]) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = tokens, end, [end]
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode(errors="replace"))


def _grammar(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    if constraint.kind == "choices":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, constraint.texts)))
    [text] = constraint.texts
    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if constraint.kind == "grammar":
        return LLMatcher.grammar_from_lark(_lark(constraint))
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise constraint.refused("must be a JSON object")
    if _common_multiple(schema) > MAX_SCHEMA_MULTIPLE:
        raise constraint.refused(f"multipleOf: their least common multiple must be at most {MAX_SCHEMA_MULTIPLE}")
    _check_merged(constraint, schema)
    try:
        return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": _WHITESPACE})
    except ValueError as error:
        raise constraint.refused(_reason(str(error))) from None


def _lark(constraint: Constraint) -> str:
    """Return the grammar in Lark's syntax. Raises InvalidRequest if it cannot be read or could cost hours."""
    from llguidance.gbnf_to_lark import any_to_lark

    [text] = constraint.texts
    if "%json" in text:
        raise constraint.refused("must not contain %json: send a schema as json_schema instead")
    if (found := text.count("&") + text.count("~")) > MAX_GRAMMAR_OPERATORS:  # llguidance's time doubles with each
        raise constraint.refused(
            f"& and ~: at most {MAX_GRAMMAR_OPERATORS} together, got {found} (\\x26 is & in a text)"
        )
    if (rules := text.count("::=")) > MAX_GRAMMAR_RULES:
        raise constraint.refused(f"at most {MAX_GRAMMAR_RULES} rules, got {rules}")
    try:
        lark = any_to_lark(text)
    except RecursionError:
        raise constraint.refused("its nesting is too deep") from None
    except Exception as error:  # noqa: BLE001  (the converter raises plain ones for a wrong grammar)
        raise constraint.refused(_reason(str(error))) from None
    if (parts := sum(bool(part) for part in _PARTS.findall(lark))) > MAX_GRAMMAR_PARTS:
        text = f"at most {MAX_GRAMMAR_PARTS} names, expressions, numbers and operators, got {parts}"
        raise constraint.refused(text)
    return lark


def _after_free_text(constraint: Constraint, marks: Mapping[str, int | None]) -> str:
    """Return a grammar of a free text up to one of `marks`, each a token or else a text, and then the answer."""
    free = " | ".join(f"free{at}" for at in range(len(marks)))
    lines = [f"start: ({free}) WS answer", r"WS: /\s{0,4}/", "FREE: /(?s:.*)/"]
    for at, (mark, token_id) in enumerate(marks.items()):
        text = f"free{at}[suffix={json.dumps(mark)}]: FREE"
        lines.append(text if token_id is None else f"free{at}: FREE <[{token_id}]>")
    if constraint.kind == "choices":
        answer = " | ".join(map(json.dumps, constraint.texts))
    elif constraint.kind == "grammar":
        answer = f"%lark {{\n{_lark(constraint)}\n}}"
    elif constraint.kind == "regex":
        escaped = {"/": r"\/", "\n": r"\n"}
        answer = f"/{_IN_SLASHES.sub(lambda part: escaped.get(part[0], part[0]), constraint.texts[0])}/"
    else:
        schema = json.loads(constraint.texts[0])
        given = schema.get("x-guidance")
        shape = {"whitespace_pattern": _WHITESPACE} | (given if isinstance(given, dict) else {})
        answer = "%json " + json.dumps(schema | {"x-guidance": shape})
    return "\n".join([*lines, f"answer: {answer}"])


def _items(schema: object) -> Iterator[object]:
    """Yield `schema` and all objects, lists and values in it."""
    todo = [schema]
    while todo:
        yield (item := todo.pop())
        todo += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()


def _common_multiple(schema: object) -> int:
    """Return the least common multiple of all `multipleOf`, in units of their finest place: llguidance's states."""
    found = set[Decimal]()
    for item in _items(schema):
        value = item.get("multipleOf") if isinstance(item, dict) else None
        if isinstance(value, int | float) and value:
            found.add(abs(Decimal(repr(value + 0))).normalize())
    places = [exponent for value in found if isinstance(exponent := value.as_tuple().exponent, int)]
    if len(places) < len(found) or min(places, default=0) < -_MAX_PLACES or max(found, default=0) > MAX_SCHEMA_MULTIPLE:
        return MAX_SCHEMA_MULTIPLE + 1
    return lcm(*(int(value.scaleb(-min([0, *places]))) for value in found))


def _check_merged(constraint: Constraint, schema: dict[str, Any]) -> None:
    """Limit patterns that apply to one value: llguidance has no limit, and its time rises steeply with each."""
    for patterns, most, text in (
        (_text_patterns, MAX_SCHEMA_PATTERNS, "pattern, format: at most {} together for one string"),
        (_name_patterns, MAX_NAME_PATTERNS, "patternProperties: at most {} together for one object"),
    ):
        try:
            found = _of_one_value(schema, patterns, most)
        except RecursionError:
            reason = "recursion limit exceeded: its nesting or its references are too deep"
            raise constraint.refused(reason) from None
        if found > most:
            raise constraint.refused(f"{text.format(most)}, got {found}")


def _text_patterns(node: dict[str, Any]) -> set[str]:
    return {f"{name} {node[name]}" for name in _PATTERN_KEYS if isinstance(node.get(name), str)}


def _name_patterns(node: dict[str, Any]) -> set[str]:
    return set(named) if isinstance(named := node.get("patternProperties"), dict) else set()


def _of_one_value(schema: dict[str, Any], patterns: _Patterns, most: int) -> int:
    """Return a bound for how many `patterns` apply to one value: all of them if these are at most `most`, or if
    references may not resolve.
    """
    nodes = [item for item in _items(schema) if isinstance(item, dict)]
    found = set[str]().union(*map(patterns, nodes))
    plain = all(
        (node is schema or not any(isinstance(node.get(key), str) for key in _BASE_KEYS))
        and (not isinstance(reference := node.get("$ref"), str) or reference == "#" or reference.startswith("#/"))
        for node in nodes
    )
    return _sum(schema, schema, patterns, {}) if plain and len(found) > most else len(found)


def _sum(node: object, root: object, patterns: _Patterns, known: dict[str, int]) -> int:
    """Return that bound for `node`. `known` caches the results for references."""
    if not isinstance(node, dict):
        return 0
    found = len(patterns(node)) + _behind(node.get("$ref"), root, patterns, known)
    for name, value in node.items():
        if name not in _NO_SCHEMAS:
            each = [_sum(part, root, patterns, known) for part in _parts(name, value)]
            found += sum(each) if name == "allOf" else max(each, default=0)
    return found


def _parts(name: str, value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values() if name in _NAMED_SCHEMAS else (value,)
    return value if isinstance(value, list) else ()


def _behind(reference: object, root: object, patterns: _Patterns, known: dict[str, int]) -> int:
    """Return the bound for the target of `reference`; 0 for a cycle, because the outer visit counts it."""
    if not isinstance(reference, str):
        return 0
    if reference not in known:
        known[reference] = 0
        known[reference] = _sum(_target(reference, root), root, patterns, known)
    return known[reference]


def _target(reference: str, node: Any) -> Any:
    for step in reference.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            node = node[int(name)] if name.isdecimal() and int(name) < len(node) else None
        else:
            node = node.get(name) if isinstance(node, dict) else None
    return node


def _reason(text: str) -> str:
    """Return the first line with a parser's error, or else the first line."""
    if text.startswith("panic"):
        return _COMPLEX
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = next((line for line in lines if line.startswith("error:")), lines[0] if lines else "cannot be parsed")
    return found.removeprefix("error:").strip()[:_MAX_REASON_CHARS]
