"""Reads from the source the events that the product logs, with their levels and keys."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("baton", "router", "prefill_workers", "decode_workers", "kvtransfer")
LEVELS = {"debug", "info", "warning", "error", "critical", "exception"}


@dataclass
class Said:
    """Levels and keys of one event, in all places together."""

    levels: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)


def texts(node: ast.expr) -> list[str]:
    """Return the possible strings of an expression. An unknown part is `*`."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.IfExp(body=body, orelse=other):
            return texts(body) + texts(other)
        case ast.JoinedStr(values=values):
            return ["".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in values)]
        case _:
            return []


def methods(node: ast.expr) -> list[str]:
    """Return the levels of a log method such as `log.info`, or of a choice between two."""
    match node:
        case ast.Attribute(value=ast.Name(id="log"), attr=level) if level in LEVELS:
            return ["error" if level == "exception" else level]
        case ast.IfExp(body=body, orelse=other):
            return methods(body) + methods(other)
        case _:
            return []


def is_step(call: ast.Call) -> bool:
    """Return whether a call is `self._history.step("event", handoff)`, which logs `handoff_event`."""
    return getattr(call.func, "attr", "") == "step" and ast.unparse(call.func).endswith("._history.step")


def logged(call: ast.Call, chosen: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    """Return levels and names of a log call; both are empty for other calls. `chosen`: aliases of log methods."""
    match call:
        case ast.Call(args=[name, *_]) if is_step(call):
            return ["debug"], [f"handoff_{text}" for text in texts(name)]
        case ast.Call(func=ast.Attribute(attr="callback"), args=[method, name, *_]) if methods(method):
            return methods(method), texts(name)  # `leaving.callback(log.info, "event", ...)`
        case ast.Call(func=ast.Name(id=name), args=[first, *_]):
            return chosen.get(name, []), texts(first)
        case ast.Call(func=func, args=args):
            return methods(func), texts(args[0]) if args else []


def forgotten(node: ast.AST) -> str | None:
    """Return the step logged by a worker's `_forget(handoff, how)`, which is `how`."""
    match node:
        case (
            ast.Call(func=ast.Attribute(attr="_forget"), args=[_, ast.Constant(value=str(how))])
            | ast.FunctionDef(name="_forget", args=ast.arguments(defaults=[ast.Constant(value=str(how))]))
            | ast.GeneratorExp(elt=ast.Tuple(elts=[_, ast.Constant(value=str(how))]))
        ):
            return how
        case _:
            return None


@cache
def events() -> dict[str, Said]:
    """Return the events of all log calls, by name. `*` replaces a part computed at run time."""
    found: defaultdict[str, Said] = defaultdict(Said)
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        is_role = path.parent.name in {"prefill_workers", "decode_workers"}
        if not (is_role or re.search(r"\blog\b|step\(", text)):
            continue
        nodes = list(ast.walk(ast.parse(text)))
        assigned = (node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name))
        chosen = {ast.unparse(node.targets[0]): methods(node.value) for node in assigned}
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            levels, names = logged(call, chosen)
            assert names or not levels or "_history" in ast.unparse(call), (
                f"{path}:{call.lineno}: an event needs a name"
            )
            for name in names if levels else ():
                found[name].levels |= set(levels)
                found[name].keys |= {word.arg for word in call.keywords if word.arg} - {"exc_info"}
        for how in filter(None, map(forgotten, nodes if is_role else ())):
            found[f"handoff_{how}"].levels.add("debug")
    del found["handoff_*"]  # the generic `History.step`; its callers are included
    return dict(found)
