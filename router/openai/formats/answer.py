"""The reader of one answer: reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from router.openai.formats.calls import FORMS, Form, Tools, section
from router.openai.formats.harmony import read_harmony
from router.openai.formats.text import Arguments, Call, Part, Reasoning, Source, Steps
from router.parsing.model_forms import REASONING


def reader_of(reasoning: str, form: str, tools: Tools, *, opened: bool = False) -> Source:
    """Return a reader of answers. `reasoning` and `form` are the model's forms; unknown ones find no reasoning, and
    only bare calls. `tools` may be called; `opened` means that the prompt ends inside reasoning.
    """
    if reasoning == "harmony" or (form == "harmony" and not reasoning):
        return Source(partial(read_harmony, tools=tools))
    begins, ends = REASONING.get(reasoning, ((), ()))
    found = Source(lambda s: _answer(s, begins, ends, FORMS.get(form, FORMS["json"]), tools, opened))
    found.thinking = opened and bool(ends)
    return found


def _answer(
    s: Source, begins: tuple[str, ...], ends: tuple[str, ...], form: Form, tools: Tools, opened: bool
) -> Steps[None]:
    if opened and ends:
        yield from s.spaces()
        yield from s.took(*begins)  # some models repeat the mark of the prompt
        yield from _reasoning(s, ends)
    marks, called = form.marks if tools else (), False
    while (yield from s.ahead()):
        if not s.said and tools and (yield from s.attempt(section(s, form, tools, bare=True))):
            called = True
            continue
        mark = yield from s.until(marks, s.say, line=begins, cut=called)
        gap = s.gap
        if mark in begins:
            s.take(len(mark))
            yield from _reasoning(s, ends)
        elif mark and (yield from s.attempt(section(s, form, tools, bare=False))):
            called = True
        elif mark:
            s.say(gap + s.take(len(mark)))


def _reasoning(s: Source, ends: tuple[str, ...]) -> Steps[None]:
    """Read reasoning without white space around it. Nothing in it is a call."""
    s.thinking = True
    yield from s.spaces()
    s.take(len((yield from s.until(ends, s.reason, cut=True))))
    s.said = s.thinking = False
    yield from s.spaces()


@dataclass(slots=True)
class ReadAnswer:
    """An answer as a whole."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[Call, str]] = field(default_factory=list)  # with arguments


def whole(parts: Sequence[Part]) -> ReadAnswer:
    """Return the answer that these parts make."""
    found = ReadAnswer()
    for part in parts:
        match part:
            case str():
                found.content += part
            case Reasoning(text):
                found.reasoning += text
            case Call():
                found.calls.append((part, ""))
            case Arguments(text):
                call, before = found.calls[-1]
                found.calls[-1] = call, before + text
    return found
