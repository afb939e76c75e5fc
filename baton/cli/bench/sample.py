"""What a client saw of one request, and whether that was good enough."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

NOT_SENT = "NotSent"  # as `error`: too many were under way, and this one was never sent


@dataclass(slots=True)
class Sample:
    """One request: times in seconds, of one clock. `start` is when it was to be sent, which is what all latencies count
    from: a client that is late makes nothing look better. `error` is the class of what ended it, "" if nothing did.
    """

    start: float
    sent: float | None = None  # None: it was not
    end: float = 0.0
    times: list[float] = field(default_factory=list)  # of each message with tokens
    prompt_tokens: int = 0
    tokens: int = 0
    error: str = ""
    deterministic: bool = False

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.start

    @property
    def tpot_s(self) -> float | None:
        """None with fewer than two tokens."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def e2e_s(self) -> float:
        return self.end - self.start

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.times)]

    def plain(self, origin: float) -> dict[str, Any]:
        """As JSON can carry it: times from `origin`, to the microsecond."""
        times = [round(time - origin, 6) for time in self.times]
        sent = None if self.sent is None else round(self.sent - origin, 6)
        start, end = round(self.start - origin, 6), round(self.end - origin, 6)
        return asdict(self) | {"start": start, "sent": sent, "end": end, "times": times}


@dataclass(frozen=True, slots=True)
class Goals:
    """Milliseconds that a request may take, where they are given."""

    ttft_ms: float | None = None  # until the first token
    itl_ms: float | None = None  # between two tokens, in the mean of the request: its TPOT
    gap_ms: float | None = None  # between two messages, at most
    e2e_ms: float | None = None  # until its end

    def given(self) -> dict[str, float]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def met(self, sample: Sample) -> dict[str, bool]:
        """Of each goal that is given, whether a request that succeeded met it."""
        took_s = {
            "ttft_ms": sample.ttft_s,
            "itl_ms": sample.tpot_s or 0.0,
            "gap_ms": max(sample.gaps_s, default=0.0),
            "e2e_ms": sample.e2e_s,
        }
        return {name: took_s[name] * 1e3 <= most for name, most in self.given().items()}
