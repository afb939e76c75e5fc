"""Parts of docs/reference/log-events.md: each event with its processes, levels and keys.

Levels and keys come from the log calls in the source, processes and meanings from `event_meanings`. An event without an
entry, or an entry without an event, stops the generation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tools.log_events import Said, events
from tools.reference.event_meanings import GROUPS, LEVEL, MORE_KEYS
from tools.reference.pages import Page, code, table

HEAD = ("event", "process", "level", "keys", "meaning")
LEVELS = ("debug", "info", "warning", "error", "critical")


def page() -> Page:
    """Return the page of events. Raises ValueError if entries and events differ."""
    logged = events()
    entries = {name: _of(name, logged) for group in GROUPS.values() for name in group}
    if len(entries) != sum(map(len, GROUPS.values())):
        raise ValueError("tools/reference/event_meanings.py: an event is in two groups")
    unknown = [name for name, found in entries.items() if not found]
    covered = {event for found in entries.values() for event in found}
    if unknown or covered != {*logged}:
        raise ValueError(f"tools/reference/event_meanings.py: no event {unknown}, no entry {logged.keys() - covered}")
    return Page("log-events.md", {part: _table(group, entries, logged) for part, group in GROUPS.items()})


def _of(name: str, logged: Mapping[str, Said]) -> list[str]:
    """Return the events of the source that an entry describes: that of its name, or those of a matching pattern."""
    return [name] if name in logged else [each for each in logged if re.fullmatch(each.replace("*", "[a-z]+"), name)]


def _table(group: Mapping[str, tuple[str, str]], entries: Mapping[str, list[str]], logged: Mapping[str, Said]) -> str:
    return table(HEAD, (_row(name, *group[name], [logged[each] for each in entries[name]]) for name in group))


def _row(name: str, process: str, meaning: str, found: list[Said]) -> tuple[str, ...]:
    levels = [level for level in LEVELS if any(level in each.levels for each in found)]
    if name in LEVEL and LEVEL[name] in levels:
        levels = [LEVEL[name]]
    keys = {key for each in found for key in each.keys} | {*MORE_KEYS.get(name, ())}
    if "handoff" in keys or name.startswith("handoff_"):
        keys = keys - {"handoff"} | {"request_id", "attempt"}
    first = [key for key in ("request_id", "attempt") if key in keys]
    shown = [*first, *sorted(keys.difference(first))]
    return code(name), process, ", ".join(levels), ", ".join(map(code, shown)), meaning
