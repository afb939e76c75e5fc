"""docs/logs.md names every event that a process may log, with its level and keys, and no other."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("baton", "router", "prefill_workers", "decode_workers", "kvtransfer")
LEVELS = {"debug", "info", "warning", "error", "critical", "exception"}
ROW = re.compile(r"^\| `([a-z_]+)` \| ([^|]+) \| ([a-z, ]+) \| ([^|]*) \|", re.MULTILINE)


@dataclass
class Said:
    """What the code says of one event, in all places together."""

    levels: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)


def texts(node: ast.expr) -> list[str]:
    """The strings that an expression may be; a part that is not known is `*`."""
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
    """The levels of an expression that is a log method, as `log.info`, or a choice between two."""
    match node:
        case ast.Attribute(value=ast.Name(id="log"), attr=level) if level in LEVELS:
            return ["error" if level == "exception" else level]
        case ast.IfExp(body=body, orelse=other):
            return methods(body) + methods(other)
        case _:
            return []


def is_step(call: ast.Call) -> bool:
    """`self._history.step("event", handoff)` logs `handoff_event`."""
    return getattr(call.func, "attr", "") == "step" and ast.unparse(call.func).endswith("._history.step")


def logged(call: ast.Call, chosen: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    """Levels and names of a call that logs; no levels: it does not. `chosen`: names that stand for a log method."""
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
    """How workers forget a handoff: `_forget(handoff, how)`, whose `how` is the step that it notes."""
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
    """Of all log calls, by name; `*` stands for a part that the code puts in."""
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
    del found["handoff_*"]  # `History.step` itself: its callers are here
    return dict(found)


def documented() -> dict[str, tuple[str, set[str], set[str]]]:
    text = (ROOT / "docs" / "logs.md").read_text(encoding="utf-8")
    rows = ROW.findall(text)
    assert len(rows) == len({row[0] for row in rows}), "an event has two rows"
    return {name: (who, set(level.split(", ")), set(re.findall(r"`(\w+)`", keys))) for name, who, level, keys in rows}


def matching(name: str, among: dict[str, Said]) -> list[str]:
    """The event of the code that a row is about: of its name, or else of a pattern."""
    return [name] if name in among else [event for event in among if re.fullmatch(event.replace("*", "[a-z]+"), name)]


def test_every_event_is_in_the_table():
    table = documented()
    missing = [event for event in events() if not any(matching(row, {event: Said()}) for row in table)]
    assert missing == [], "docs/logs.md: events without a row"


def test_every_row_is_an_event_with_its_level_and_keys():
    found, wrong = events(), []
    for name, (_, levels, keys) in documented().items():
        named = matching(name, found)
        said = Said(
            *(set().union(*parts) for parts in ([found[e].levels for e in named], [found[e].keys for e in named]))
        )
        if "handoff" in said.keys:
            said.keys = said.keys - {"handoff"} | {"request_id", "attempt"}
        if not named or not levels <= said.levels:
            wrong.append(f"{name}: {sorted(levels)} in the table, {sorted(said.levels)} in the code")
        if said.keys - keys:
            wrong.append(f"{name}: {sorted(said.keys - keys)} is logged, and not in the table")
    assert wrong == []


def test_names_and_keys_have_one_form():
    """A request is `request_id` and `attempt`, a worker `worker`, a cause `reason` or `error`; no request's words."""
    forbidden = {"request", "sender", "peer", "why", "cause", "prompt", "ids", "ref"}
    for name, said in events().items():
        assert re.fullmatch(r"[a-z_*]+", name), name
        assert not said.keys & forbidden, f"{name}: {said.keys & forbidden}"
