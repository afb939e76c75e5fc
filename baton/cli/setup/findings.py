"""The result of one check of `baton doctor`."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, BAD = "ok", "note", "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `remedy` is the action to take if it is not ok."""

    what: str
    verdict: str
    found: str
    remedy: str = ""
