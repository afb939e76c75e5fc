"""What the whole text of an answer must match, as a client says it. What it means to a model: `baton.grammar`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton.errors import InvalidRequest
from baton.limits import MAX_CHOICE_CHARS, MAX_CHOICE_TEXTS, MAX_REGEX_BYTES, MAX_SCHEMA_BYTES

Kind = Literal["json_schema", "regex", "choices"]

_MOST_BYTES = {"json_schema": MAX_SCHEMA_BYTES, "regex": MAX_REGEX_BYTES}


@dataclass(frozen=True, slots=True)
class Constraint:
    """One JSON schema, one regular expression, or the texts of which the answer is one."""

    kind: Kind
    texts: tuple[str, ...]

    def __post_init__(self) -> None:
        size, most = sum(len(text.encode()) for text in self.texts), _MOST_BYTES.get(self.kind, 0)
        if self.kind == "choices":
            if not 1 <= len(self.texts) <= MAX_CHOICE_TEXTS:
                raise self.refused(f"there must be 1 to {MAX_CHOICE_TEXTS}, got {len(self.texts)}")
            if not all(1 <= len(text) <= MAX_CHOICE_CHARS for text in self.texts):
                raise self.refused(f"each must have 1 to {MAX_CHOICE_CHARS} characters")
        elif not 1 <= size <= most:
            raise self.refused(f"must have 1 to {most} bytes, got {size}")

    def refused(self, why: str) -> InvalidRequest:
        """The error that names what is wrong with it."""
        return InvalidRequest.of(f"constraint.{self.kind}", why)
