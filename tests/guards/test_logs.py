"""docs/logs.md names every event that a process may log, with its level and keys, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from tools.log_events import Said, events

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `([a-z_]+)` \| ([^|]+) \| ([a-z, ]+) \| ([^|]*) \|", re.MULTILINE)


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
