"""Chat templates, rendered as `transformers` does, in bounded time and output.

The template comes with the model, its input from clients. It runs in jinja's sandbox, and each loop turn, macro call
and piece of output checks the limits. Memory is unlimited: a template can waste it, but the operator chooses the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from time import monotonic
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.limits import (
    MAX_RENDERED_CHARS,
    MAX_TEMPLATE_CHARS,
    MAX_TEMPLATE_PRODUCT,
    MAX_TEMPLATE_SECONDS,
)
from router.parsing.model_forms import tool_form

_TICK = "baton_tick"
MARK = "90317460258"  # to find a text in what a template writes; digits, because it may change the case
# Errors of jinja for an invalid template. It can also generate Python that does not compile (20 nested loops).
_UNREADABLE = (TemplateError, RecursionError, SyntaxError, ValueError)
_FUNCTIONS = frozenset({"raise_exception", "strftime_now", _TICK})


class TemplateFailed(Exception):
    """The reason why a template is invalid or failed to render."""


class Template:
    """A compiled template. `variables` are the names that it reads and does not set, `tool_form` is its form of tool
    calls ("" without tools). Raises TemplateFailed if it is too long or invalid.
    """

    def __init__(self, source: str, clock: Callable[[], float] = monotonic) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateFailed(f"it has {len(source)} characters, of {MAX_TEMPLATE_CHARS} at most")
        environment = _Environment()
        try:
            tree = environment.parse(source)
            self.variables = frozenset(find_undeclared_variables(tree)) - environment.globals.keys() - _FUNCTIONS
            self._words = frozenset(_words(tree))
            _watch(tree)
            self._template = environment.from_string(tree)
        except _UNREADABLE as error:
            raise TemplateFailed(f"{type(error).__name__}: {error}") from error
        self.tool_form = tool_form(source) if "tools" in self.variables else ""
        self._clock = clock
        self.takes_texts = True  # see `probe`

    def mentions(self, word: str) -> bool:
        """Return whether the template reads a variable or a field named `word`."""
        return word in self.variables or word in self._words

    def probe(self, variables: Mapping[str, object]) -> None:
        """Set `takes_texts`: whether it writes a content that is a text, as it does not if it expects parts."""
        tried = {"messages": [{"role": "user", "content": MARK}], "add_generation_prompt": False, "tools": None}
        try:
            self.takes_texts = MARK in self.render({**variables, **tried})
        except TemplateFailed:
            self.takes_texts = False

    def render(self, variables: Mapping[str, object]) -> str:
        """Render in any thread. Raises TemplateFailed if the template rejects `variables` or exceeds a limit."""
        meter = _Meter(self._clock)
        functions = {"raise_exception": _refuse, "strftime_now": datetime.now().strftime, _TICK: meter.tick}
        try:
            return "".join(meter.measured(piece) for piece in self._template.generate({**variables, **functions}))
        except TemplateFailed:
            raise
        except Exception as error:  # a template's code can raise any exception
            raise TemplateFailed(f"{type(error).__name__}: {str(error)[:200]}") from error


class _Meter:
    """The time and output used by one rendering."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until = clock() + MAX_TEMPLATE_SECONDS
        self._chars = 0

    def tick(self) -> str:
        if self._clock() > self._until:
            raise TemplateFailed(f"it takes longer than {MAX_TEMPLATE_SECONDS:g} s")
        return ""

    def measured(self, piece: str) -> str:
        self._chars += len(piece)
        if self._chars > MAX_RENDERED_CHARS:
            raise TemplateFailed(f"it writes more than {MAX_RENDERED_CHARS} characters")
        return piece + self.tick()


class _Generation(Extension):
    """Parses `{% generation %}`, which marks the model's output for training. Its content is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (as jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.filters["tojson"] = _tojson
        del self.globals["lipsum"]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) if isinstance(side, str | list | tuple) else abs(side) for side in (left, right)]
        if (sizes[0] * sizes[1] if operator == "*" else sizes[1] * len(str(left))) > MAX_TEMPLATE_PRODUCT:
            raise TemplateFailed(f"a result of {operator} is larger than {MAX_TEMPLATE_PRODUCT}")
        return super().call_binop(context, operator, left, right)


def _watch(tree: nodes.Template) -> None:
    """Insert a clock check into every loop and macro."""
    circles: list[nodes.For | nodes.Macro | nodes.CallBlock] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
    for node in [*circles, *tree.find_all(nodes.CallBlock)]:
        tick = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))


def _words(tree: nodes.Template) -> list[str]:
    fields = [node.attr for node in tree.find_all(nodes.Getattr)]
    return fields + [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]


def _refuse(message: str) -> None:
    raise TemplateFailed(str(message)[:500])


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as `transformers` does, because jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
