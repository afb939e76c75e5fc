"""Which trace a request belongs to: W3C's `traceparent`, or a new one."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

TRACEPARENT = "traceparent"
_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """`parent_id`: the caller's span, 16 hex digits; "": it said none. `sampled`: whether it is exported; None: the
    caller did not say.
    """

    trace_id: str
    parent_id: str = ""
    sampled: bool | None = None

    @classmethod
    def new(cls) -> TraceContext:
        return cls(secrets.token_hex(16))

    @classmethod
    def parse(cls, header: str) -> TraceContext | None:
        """None: it is not exactly what version 00 of the format says, and so is nobody's."""
        found = _FORM.fullmatch(header)
        if found is None or not int(found[1], 16) or not int(found[2], 16):
            return None
        return cls(found[1], found[2], bool(int(found[3], 16) & 1))

    def exported(self, sample: float) -> bool:
        """Whether it is among the share `sample` of all, unless the caller has decided. Equal ids have equal fates."""
        if self.sampled is not None:
            return self.sampled
        return int(self.trace_id[16:], 16) < sample * 2**64
