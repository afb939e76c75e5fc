"""How a model marks its reasoning and writes tool calls, detected in its chat template and its special tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

# Reasoning by form: the marks that may begin it, and those that end it. `harmony` has channels instead.
REASONING: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "think": (("<think>",), ("</think>",)),
    "magistral": (("[THINK]",), ("[/THINK]",)),
    "granite": (("Here is my thought process:", "Here's my thought process:"),
                ("Here is my response:", "Here's my response:")),
    "seed": (("<seed:think>",), ("</seed:think>",)),
    "harmony": ((), ()),
}  # fmt: skip
_REASONING_IN = {
    "harmony": r"<\|channel\|>",
    "magistral": r"\[/?THINK\]",
    "granite": "Here is my thought process",
    "seed": "</seed:think>",
    "think": "</?think>",
}
# Some templates also contain a mark of a family further down.
_CALLS_IN = {
    "harmony": r"<\|channel\|>",
    "glm": "<arg_key>",
    "qwen3_coder": "<parameter=|<invoke name=",
    "json": "<function=",  # the name before the arguments, in Llama's own form
    "kimi": r"<\|tool_calls_section_begin\|>",
    "deepseek": "<｜tool▁calls?▁begin｜>",
    "granite": r"<\|tool_call\|>",
    "hermes": "<tool_call>|<TOOLCALL>|<tool_calls>",
    "mistral": r"\[TOOL_CALLS\]",
    "pythonic": r"<\|python_start\|>|<\|tool_call_start\|>|\[func_name1\(",
    "llama": r"""["']parameters["']: """,
}
TOOL_FORMS = (*_CALLS_IN,)
# Special tokens of marks that a template may leave to the model.
_TOKENS = {"[THINK]": "magistral", "<think>": "think", "<|channel|>": "harmony"}


def tool_form(source: str) -> str:
    """Return the form in which a template has the model write tool calls, or "json" if it is unknown."""
    return next((form for form, mark in _CALLS_IN.items() if re.search(mark, source)), "json")


def reasoning_form(sources: Iterable[str], has_token: Callable[[str], bool]) -> str:
    """Return the form of reasoning in the templates, or by a token of the model, or "" if there is none."""
    text = "\n".join(sources)
    found = next((form for form, mark in _REASONING_IN.items() if re.search(mark, text)), "")
    return found or next((form for token, form in _TOKENS.items() if has_token(token)), "")


def ends_in_reasoning(prompt: str, form: str) -> bool:
    """Return whether a rendered prompt ends inside opened reasoning, as those of DeepSeek R1 do."""
    begins, _ = REASONING.get(form, ((), ()))
    return prompt.rstrip().endswith(begins)


def opens_reasoning(text: str, form: str) -> bool:
    """Return whether `text`, the beginning of an answer, ends inside reasoning, which begins where a line begins."""
    begins, ends = REASONING.get(form, ((), ()))
    marks = "|".join(map(re.escape, begins))
    begun = max((found.start() for found in re.finditer(rf"^[ \t]*(?:{marks})", text, re.MULTILINE)), default=-1)
    return bool(begins) and begun > max(map(text.rfind, ends))
