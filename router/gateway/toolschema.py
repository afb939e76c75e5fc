"""Tools in the body of `/v1/chat/completions`: those that a model may call, which of them it has to, and past calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from router.gateway.body import Body

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_CHOICE = 'must be none, auto, required, or {"type": "function", "function": {"name": ...}}'


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError("must be 1 to 64 of the characters A-Z a-z 0-9 _ -")
    return value


def _of_object(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("type", "object") != "object":
        raise ValueError("must be a JSON schema of type object")
    return value


def _arguments(value: str) -> str:
    """Raises ValueError."""
    try:
        found = json.loads(value or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("must be a JSON object, as a string")
    return value


class Function(Body):
    """What a model may call. Without `parameters` it takes none."""

    name: Annotated[str, AfterValidator(_name)]
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_of_object)] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool, which is a function."""

    type: Literal["function"]
    function: Function


class CalledFunction(Body):
    """What a model has called; `arguments` are JSON."""

    name: str
    arguments: Annotated[str, AfterValidator(_arguments)]


class ToolCall(Body):
    """A call in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


def choice_of(value: object) -> object:
    """`tool_choice`: none, auto and required as they are, a function as a list of its name. Raises ValueError."""
    if value is None or value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(value, dict) or not isinstance(function, dict) or {*value} != {"type", "function"}:
        raise ValueError(_CHOICE)
    if {*function} != {"name"} or not isinstance(function["name"], str):
        raise ValueError(_CHOICE)
    return [function["name"]]


def check_choice(tools: Sequence[Tool], choice: object) -> None:
    """Raises ValueError, naming the field: two tools of one name, or a choice that none of them is."""
    names = [tool.function.name for tool in tools]
    twice = next((place for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise ValueError(f"tools[{twice}].function.name: another function has this name")
    if choice in (None, "none", "auto"):
        return
    if not names:
        raise ValueError("tool_choice: only allowed with tools")
    if isinstance(choice, list) and choice[0] not in names:
        raise ValueError(f"tool_choice: must name one of tools: {', '.join(names)}")
