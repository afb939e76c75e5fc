"""The form of gpt-oss: messages with a channel, of which one answer has several.

    <|channel|>analysis<|message|>REASONING<|end|><|start|>assistant<|channel|>final<|message|>CONTENT
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}

`<|call|>` and `<|return|>` end the answer and have no text. Commentary without a recipient is content.
"""

from __future__ import annotations

import re

from router.openai.formats.calls import FORMS, Tools, raw, section
from router.openai.formats.text import Source, Steps

_MARKS = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = "<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"
_TO = re.compile(r"to=(?:functions\.)?([\w.-]+)")


def read_harmony(s: Source, tools: Tools) -> Steps[None]:
    """Read an answer of messages. Text outside of a message is content, as that of constrained answers is."""
    while (yield from s.ahead()):
        if not s.said and tools and (yield from s.attempt(section(s, FORMS["json"], tools, bare=True))):
            continue
        mark = yield from s.until(_MARKS, s.say, cut=not s.said)
        s.take(len(mark))
        while mark:
            mark = yield from _message(s, tools, mark)


def _message(s: Source, tools: Tools, mark: str) -> Steps[str]:
    """Read a message from its first mark on. Return the mark of the next one, or ""."""
    header = list[str]()
    if mark != "<|message|>":
        mark = yield from s.through(("<|message|>",), header.append)
    head = "".join(header)
    to = _TO.search(head)
    if to and to[1] in tools and (mark or not s.cut):
        s.call(to[1])
        yield from s.spaces()
        yield from raw(s)
        end = yield from s.through(_ENDS, lambda _: None)
    else:
        yield from s.spaces()
        s.thinking = "analysis" in head
        end = yield from s.until(_ENDS, s.reason if s.thinking else s.say, cut=s.thinking)
        s.take(len(end))
        s.thinking = False
    if end in _MARKS:
        return end
    yield from s.spaces()
    mark = yield from s.took(*_MARKS)
    return mark
