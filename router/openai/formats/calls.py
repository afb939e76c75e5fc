"""The forms in which models write tool calls. Each reads one section of calls, after the mark that opens it.

    hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    granite      <|tool_call|>[{"name": ..., "arguments": {...}}, ...]
    llama        <|python_tag|>{"name": ..., "parameters": {...}}; {...}
    mistral      [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]NAME[ARGS]{...}
    deepseek     <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>, or as V3
    kimi         <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}...
    qwen3_coder  <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>, or with invoke
    glm          <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>
    pythonic     [NAME(KEY=VALUE, ...), ...]
    json         any other form: only bare

A form returns False if no call of an offered function was found; its text then stays content. Arguments are delivered
as they come once the function is clear. Those that are JSON are delivered as the model wrote them.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from router.openai.formats.text import Source, Steps

Tools: TypeAlias = Mapping[str, Mapping[str, Any]]  # the JSON schema of the parameters by function
Read: TypeAlias = Callable[[Source, Tools], Steps[bool]]
_ARGUMENTS = "arguments", "parameters"
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
_CLOSE = ("</tool_call>",)
_XML = "<tool_call>", "<seed:tool_call>", "<minimax:tool_call>"
_XML_CLOSE = *_CLOSE, "</seed:tool_call>", "</minimax:tool_call>", "</function>", "</invoke>"
_INVOKE, _PARAMETER = '<invoke name="', '<parameter name="'
_OBJECTS = "<tool_call>", "<TOOLCALL>", "<tool_calls>", "<|tool_call|>", "<|python_tag|>"
_PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_JSON_CONSTANTS = {"true": True, "false": False, "null": None}
_KEYWORD = re.compile(r"\s*([\w-]+)\s*=(?!=)(.*)", re.DOTALL)
_QUOTED = re.compile(r"""'(?:\\.|[^'\\])*+'?|"(?:\\.|[^"\\])*+"?""", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Form:
    """The marks that open a section of calls, and its reader. `close` may end it; a stop string with one of these marks
    does not cut calls. `separators` stand between objects. `bare` reads calls at the beginning, without marks.
    """

    marks: tuple[str, ...]
    read: Read
    close: tuple[str, ...] = ()
    separators: tuple[str, ...] = ()
    bare: Read | None = None


def section(s: Source, form: Form, tools: Tools, *, bare: bool) -> Steps[bool]:
    """Read a section of calls with white space around it: at its mark, or a `bare` one, as forced calls are."""
    yield from s.spaces()
    if not bare:
        found = yield from form.read(s, tools)
    else:
        own = form.bare is not None and (yield from s.attempt(form.bare(s, tools)))
        found = own or (yield from _items(s, tools, bare=True))
    while found and form.separators and (yield from s.attempt(_next(s, tools, form.separators))):
        pass
    if found:
        yield from s.closed(*form.close)
        yield from s.spaces()
    return found


def _items(s: Source, tools: Tools, *, bare: bool = False) -> Steps[bool]:
    if not (yield from s.took("[")):
        return (yield from _object(s, tools, bare=bare))
    yield from s.spaces()
    if not (yield from _object(s, tools, bare=bare)):
        return False
    while (yield from s.attempt(_next(s, tools))):
        pass
    yield from s.closed("]")
    return True


def _next(s: Source, tools: Tools, separators: tuple[str, ...] = (",",)) -> Steps[bool]:
    yield from s.spaces()
    if not (yield from s.took(*separators)):
        return False
    yield from s.spaces()
    return (yield from _object(s, tools))


def _object(s: Source, tools: Tools, *, bare: bool = False) -> Steps[bool]:
    """Read one call that is a JSON object. A `bare` one needs arguments, and has only keys of calls."""
    name, held, begun = "", "" if bare else "{}", False
    more = bool((yield from s.took("{")))
    if not more:
        return False
    while more:
        yield from s.spaces()
        if (yield from s.took("}")):
            break
        key = yield from _key(s)
        if key is None or (bare and key not in _KEYS):
            return begun
        if key == "name":
            name = (yield from s.string()) or ""
            if name not in tools:
                return False
        elif key in _ARGUMENTS and name and (yield from s.ahead()) == "{":
            s.call(name)
            begun = True
            yield from s.value(s.arguments)
        else:
            pieces = list[str]()
            yield from s.value(pieces.append)
            held = "".join(pieces) if key in _ARGUMENTS else held
        yield from s.spaces()
        more = bool((yield from s.took(",")))
        if not more and not (yield from s.took("}")):
            return begun
    return begun or _whole(s, name, held)


def _key(s: Source) -> Steps[str | None]:
    key = yield from s.string()
    yield from s.spaces()
    if not (yield from s.took(":")):
        return None
    yield from s.spaces()
    return key


def _whole(s: Source, name: str, held: str) -> bool:
    """Deliver a call whose arguments came before its name, as a string, or not at all."""
    try:
        value = json.loads(held)
        value = json.loads(value or "{}") if isinstance(value, str) else {} if value is None else value
        text = json.dumps(value, ensure_ascii=False)
        text.encode()  # raises for half a surrogate pair, which cannot be sent
    except (ValueError, RecursionError):
        return False
    if not name or not isinstance(value, dict):
        return False
    s.call(name)
    s.arguments(text)
    return True


def _objects(s: Source, tools: Tools) -> Steps[bool]:
    yield from s.took(*_OBJECTS)
    yield from s.spaces()
    return (yield from _items(s, tools))


def _mistral(s: Source, tools: Tools) -> Steps[bool]:
    yield from s.took("[TOOL_CALLS]")
    yield from s.spaces()
    if (yield from s.ahead()) in ("[", "{"):
        return (yield from _items(s, tools))
    name, given_id = (yield from s.word()), ""
    if (yield from s.took("[CALL_ID]")):
        given_id = yield from s.word()
    marked = yield from s.took("[ARGS]")
    yield from s.spaces()
    if name not in tools or not (marked or (yield from s.ahead()) == "{"):
        return False
    s.call(name, given_id)
    return (yield from raw(s))


def raw(s: Source) -> Steps[bool]:
    """Read the arguments of a call that has begun. Without an object they are empty, unless they were cut."""
    first = yield from s.ahead()
    if first == "{":
        yield from s.value(s.arguments)
    elif first or not s.cut:
        s.arguments("{}")
    return True


def _name(s: Source, *marks: str) -> Steps[str]:
    """Read a name up to one of `marks` and the mark. Return "" if it was cut, because it may be a part of another."""
    found = list[str]()
    mark = yield from s.through(marks, found.append)
    return "" if s.cut and not mark else "".join(found).strip()


_BEGIN, _END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"


def _deepseek(s: Source, tools: Tools) -> Steps[bool]:
    yield from s.took("<｜tool▁calls▁begin｜>")
    if not (yield from _deepseek_call(s, tools)):
        return False
    while (yield from s.attempt(_deepseek_call(s, tools))):
        pass
    return True


def _deepseek_call(s: Source, tools: Tools) -> Steps[bool]:
    yield from s.spaces()
    if not (yield from s.took(_BEGIN)):
        return False
    name = yield from _name(s, _SEPARATOR)
    older = name == "function"
    if older:  # then the name is a line, and the arguments are a block of code
        name = yield from _name(s, "\n")
    if name not in tools:
        return False
    s.call(name)
    yield from s.spaces()
    if older:
        yield from s.took("```json")
        yield from s.spaces()
    yield from raw(s)
    if older:
        yield from s.closed("```")
    yield from s.closed(_END)
    return True


def _kimi(s: Source, tools: Tools) -> Steps[bool]:
    yield from s.took("<|tool_calls_section_begin|>")
    if not (yield from _kimi_call(s, tools)):
        return False
    while (yield from s.attempt(_kimi_call(s, tools))):
        pass
    return True


def _kimi_call(s: Source, tools: Tools) -> Steps[bool]:
    yield from s.spaces()
    if not (yield from s.took("<|tool_call_begin|>")):
        return False
    given_id = yield from _name(s, "<|tool_call_argument_begin|>")
    name = given_id.removeprefix("functions.").rpartition(":")[0] or given_id
    if name not in tools:
        return False
    s.call(name, given_id)
    yield from s.spaces()
    yield from raw(s)
    yield from s.closed("<|tool_call_end|>")
    return True


def _qwen3_coder(s: Source, tools: Tools) -> Steps[bool]:
    yield from s.took(*_XML)
    if not (yield from s.attempt(_function(s, tools))):
        yield from s.spaces()
        return (yield from _items(s, tools))
    while (yield from s.attempt(_function(s, tools))):
        pass
    return True


def _function(s: Source, tools: Tools) -> Steps[bool]:
    """Read a call with tags of Qwen or, with `invoke`, of MiniMax. Models forget `</parameter>`: a mark on a new line
    ends a value, too.
    """
    yield from s.spaces()
    opened = yield from s.took("<function=", _INVOKE)
    begin, quote, end = (_PARAMETER, '">', "</invoke>") if opened == _INVOKE else ("<parameter=", ">", "</function>")
    name = (yield from _name(s, quote, "\n")) if opened else ""
    if name not in tools:
        return False
    s.call(name)
    fields = _Fields(s, tools[name], begin, end, "\n</parameter>", "</parameter>", f"\n{begin}", f"\n{end}")
    yield from s.spaces()
    mark = yield from s.took(begin, end)
    while mark == begin:
        key = yield from s.before(quote)
        mark = yield from fields.read(key)
    yield from fields.end(mark)
    return True


def _glm(s: Source, tools: Tools) -> Steps[bool]:
    yield from s.took("<tool_call>")
    yield from s.spaces()
    if (yield from s.ahead()) == "{":
        return (yield from _items(s, tools))
    names = list[str]()
    mark = yield from s.through(("<arg_key>", "</tool_call>", "\n"), names.append)
    name = "" if s.cut and not mark else "".join(names).strip()  # a part of a name may be another name
    if name not in tools:
        return False
    s.call(name)
    fields = _Fields(s, tools[name], "<arg_key>", "</tool_call>", "\n</arg_value>", "</arg_value>")
    if mark == "\n":
        yield from s.spaces()
        mark = yield from s.took("<arg_key>", "</tool_call>")
    while mark == "<arg_key>":
        key = yield from s.before("</arg_key>")
        yield from s.spaces()
        yield from s.took("<arg_value>")
        mark = yield from fields.read(key)
    yield from fields.end(mark)
    return True


class _Fields:
    """Arguments that arrive one by one, written as a JSON object. A text is delivered as it comes. `begin` begins an
    argument, one of `ends` ends its value, and `close` ends the call.
    """

    def __init__(self, s: Source, schema: Mapping[str, Any], begin: str, close: str, *ends: str) -> None:
        found = schema.get("properties")
        self._s, self._properties = s, found if isinstance(found, Mapping) else {}
        self._begin, self._close, self._ends, self._before = begin, close, ends, "{"

    def read(self, key: str) -> Steps[str]:
        """Read a value without the line breaks around it. Return `begin` or `close` if it follows."""
        s = self._s
        s.arguments(f"{self._before}{_text(key)}: ")
        self._before = ", "
        yield from s.took("\n")
        types = _types(self._properties.get(key))
        if "string" not in types or any(kind not in ("string", "null") for kind in types):
            pieces = list[str]()
            mark = yield from s.through(self._ends, pieces.append)
            s.arguments(_converted("".join(pieces)))
        elif "null" in types and (null := (yield from s.took(*(f"null{end}" for end in self._ends)))):
            mark = null.removeprefix("null")
            s.arguments("null")
        else:
            s.arguments('"')
            mark = yield from s.through(self._ends, lambda text: s.arguments(_text(text)[1:-1]))
            s.arguments('"' if mark or not s.cut else "")
        if (mark := mark.strip()) in (self._begin, self._close):
            return mark
        yield from s.spaces()
        return (yield from s.took(self._begin, self._close))

    def end(self, mark: str) -> Steps[None]:
        """End the object at its `mark`, at a part of `close`, or at other text: the model forgot its mark. An answer
        that was cut there, perhaps in `begin`, leaves it open.
        """
        s = self._s
        if mark or s.drops_part(self._close) or ((yield from s.ahead()) and not s.drops_part(self._begin)) or not s.cut:
            s.arguments("{}" if self._before == "{" else "}")


def _types(shape: object) -> list[object]:
    """Return the types of the values that a schema allows. None stands for types that it does not name."""
    if not isinstance(shape, Mapping):
        return [None]
    if kind := shape.get("type"):
        return kind if isinstance(kind, list) else [kind]
    if isinstance(values := shape.get("enum"), list):
        return ["null" if value is None else "string" if isinstance(value, str) else None for value in values]
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := shape.get(name), list):
            types = [kind for part in parts for kind in _types(part)]
            return [kind for kind in types if kind] if name == "allOf" else types
    return [None]


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _converted(text: str) -> str:
    """Return a value as JSON: JSON itself, a constant of Python, or else a text."""
    value = text.strip()
    try:
        json.loads(value, parse_constant=reject_constant)
    except (ValueError, RecursionError):
        return _PYTHON_CONSTANTS.get(value) or _text(text)
    return value


def reject_constant(constant: str) -> None:
    """Raise ValueError: Python reads NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{constant} is not JSON")


def _pythonic(s: Source, tools: Tools) -> Steps[bool]:
    yield from s.took("<|python_start|>", "<|tool_call_start|>")
    yield from s.spaces()
    if not (yield from s.took("[")) or not (yield from _python_call(s, tools)):
        return False
    while (yield from s.attempt(_python_next(s, tools))):
        pass
    yield from s.closed("]")
    return True


def _python_next(s: Source, tools: Tools) -> Steps[bool]:
    yield from s.spaces()
    return bool((yield from s.took(","))) and (yield from _python_call(s, tools))


def _python_call(s: Source, tools: Tools) -> Steps[bool]:
    yield from s.spaces()
    name = yield from s.word()
    if name not in tools or not (yield from s.took("(")):
        return False
    s.call(name)
    before, stop = "{", ","
    while stop == ",":
        stop, text = yield from s.argument()
        if field := _field(text, cut=s.cut and not stop):
            s.arguments(before + field)
            before = ", "
    if stop or not s.cut:
        s.arguments("{}" if before == "{" else "}")
    return True


def _field(text: str, *, cut: bool) -> str:
    """Return `key=value` of Python as a JSON field, or "" if it is none. A value that is no constant becomes its
    source text, unless it was cut.
    """
    if (found := _KEYWORD.fullmatch(text)) is None:
        return ""
    source = found[2].strip()
    value = _literal(source) or _literal(_QUOTED.sub(_in_one_line, source)) or ("" if cut else _text(source))
    return value and f"{_text(found[1])}: {value}"


def _literal(source: str) -> str:
    """Return a constant of Python as JSON, or "" if it is none. It may have JSON's names of constants."""
    try:
        call = _Constants().visit(ast.parse(f"f(a={source})", mode="eval").body)
        [keyword] = call.keywords if isinstance(call, ast.Call) else []
        value = json.dumps(ast.literal_eval(keyword.value), ensure_ascii=False, allow_nan=False)
        value.encode()
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ""
    return value


class _Constants(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_CONSTANTS[node.id]) if node.id in _JSON_CONSTANTS else node


def _in_one_line(quoted: re.Match[str]) -> str:
    return quoted[0].replace("\r", "\\r").replace("\n", "\\n")


def _none(s: Source, tools: Tools) -> Steps[bool]:
    yield from ()
    return False


FORMS: Mapping[str, Form] = {
    "hermes": Form(("<tool_call>", "<TOOLCALL>", "<tool_calls>"), _objects, (*_CLOSE, "</TOOLCALL>", "</tool_calls>")),
    "granite": Form(("<|tool_call|>", "<tool_call>"), _objects, _CLOSE),
    "llama": Form(("<|python_tag|>",), _objects, (";",), (";", ",")),
    "mistral": Form(("[TOOL_CALLS]",), _mistral),
    "deepseek": Form(("<｜tool▁calls▁begin｜>",), _deepseek, ("<｜tool▁calls▁end｜>",)),
    "kimi": Form(("<|tool_calls_section_begin|>",), _kimi, ("<|tool_calls_section_end|>",)),
    "qwen3_coder": Form((*_XML, "<function="), _qwen3_coder, _XML_CLOSE),
    "glm": Form(("<tool_call>",), _glm, _CLOSE),
    "pythonic": Form(
        ("<|python_start|>", "<|tool_call_start|>"), _pythonic, ("<|python_end|>", "<|tool_call_end|>"), bare=_pythonic
    ),
    "json": Form((), _none),
}
