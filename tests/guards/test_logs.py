"""docs/logs.md names every event that a process may log, with its level and keys, and no other."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
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


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "log" in (text := path.read_text(encoding="utf-8")) or "step(" in text:
                yield path, ast.parse(text)


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


def levels_of(call: ast.Call, chosen: dict[str, list[str]]) -> list[str]:
    """How a call logs: `log.LEVEL(...)`, or by a name that was chosen from such; none: it is no log call."""
    match call.func:
        case ast.Attribute(value=ast.Name(id="log"), attr=level) if level in LEVELS:
            return [level]
        case ast.Name(id=name):
            return chosen.get(name, [])
        case ast.Attribute(attr="callback") if call.args and (method := method_of(call.args[0])):
            call.args = call.args[1:]  # `leaving.callback(log.info, "event", ...)`
            return [method]
        case _:
            return []


def method_of(node: ast.expr) -> str | None:
    match node:
        case ast.Attribute(value=ast.Name(id="log"), attr=level) if level in LEVELS:
            return level
        case _:
            return None


def is_step(call: ast.Call) -> bool:
    """`self._history.step("event", handoff)` logs `handoff_event`."""
    match call.func:
        case ast.Attribute(value=ast.Attribute(attr="_history"), attr="step"):
            return True
        case _:
            return False


def choices(tree: ast.Module) -> dict[str, list[str]]:
    """Names that stand for a log method: `write = log.warning if ... else log.info`."""
    found = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.IfExp(body=one, orelse=other)):
                if (first := method_of(one)) and (second := method_of(other)):
                    found[name] = [first, second]
    return found


@cache
def events() -> dict[str, Said]:
    """Of all log calls, by name; `*` stands for a part that the code puts in."""
    found: defaultdict[str, Said] = defaultdict(Said)
    for path, tree in sources():
        chosen = choices(tree)
        for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
            step = is_step(call)
            levels = ["debug"] if step else levels_of(call, chosen)
            if not levels:
                continue
            names = [f"handoff_{text}" for text in texts(call.args[0])] if step else texts(call.args[0])
            assert names or step, f"{path}:{call.lineno}: an event needs a name"
            for name in names:
                found[name].levels |= {"error" if level == "exception" else level for level in levels}
                found[name].keys |= {word.arg for word in call.keywords if word.arg} - {"exc_info"}
    del found["handoff_*"]  # `History.step` itself: its callers are here
    for name in forgotten():
        found[f"handoff_{name}"].levels.add("debug")
    return dict(found)


def forgotten() -> Iterator[str]:
    """How workers forget a handoff: `_forget(handoff, how)`, whose `how` is the step that it notes."""
    for folder in ("prefill_workers", "decode_workers"):
        for path in (ROOT / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                match node:
                    case ast.Call(func=ast.Attribute(attr="_forget"), args=[_, ast.Constant(value=str(how))]):
                        yield how
                    case ast.FunctionDef(name="_forget", args=ast.arguments(defaults=[ast.Constant(value=str(how))])):
                        yield how
                    case ast.GeneratorExp(elt=ast.Tuple(elts=[_, ast.Constant(value=str(how))])):
                        yield how


def documented() -> dict[str, tuple[str, set[str], set[str]]]:
    """Process, levels and keys of each row."""
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
