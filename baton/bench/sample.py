"""One request as the client saw it, and the latency goals that it is judged by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from baton.errors import ConfigError

NOT_SENT = "NotSent"  # an `error`: never sent, because too many requests were in flight


@dataclass(slots=True)
class Sample:
    """One request. Times are seconds of one clock."""

    start: float  # the intended send time; latencies count from it, so a late client cannot improve them
    sent: float | None = None  # None if it was not sent
    end: float = 0.0
    times: list[float] = field(default_factory=list)  # of messages with tokens
    counts: list[int] = field(default_factory=list)  # tokens of each message
    prompt_tokens: int = 0
    tokens: int = 0
    error: str = ""  # class of the error that ended the request
    deterministic: bool = False
    prefill_worker: str = ""
    decode_worker: str = ""
    cached_tokens: int = 0  # of the prompt, not computed again
    kv_bytes: int = 0  # moved by the handoff

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.start

    @property
    def tpot_s(self) -> float | None:
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 and self.times else None

    @property
    def e2e_s(self) -> float:
        return self.end - self.start

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.times)]

    def record(self, time: float, tokens: int) -> None:
        self.times.append(time)
        self.counts.append(tokens)

    def as_dict(self, origin: float) -> dict[str, Any]:
        """Return JSON values: seconds, rounded to microseconds, `..._at_s` relative to `origin`, None if missing."""
        return {
            "intended_at_s": round(self.start - origin, 6),
            "sent_at_s": None if self.sent is None else round(self.sent - origin, 6),
            "ttft_s": round(self.ttft_s, 6) if self.times else None,
            "e2e_s": round(self.e2e_s, 6),
            "gaps_s": [round(gap, 6) for gap in self.gaps_s],
            "gap_tokens": self.counts[1:],
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.tokens,
            "error": self.error,
            "deterministic": self.deterministic,
            "prefill_worker": self.prefill_worker,
            "decode_worker": self.decode_worker,
            "cached_tokens": self.cached_tokens,
            "kv_bytes": self.kv_bytes,
        }


@dataclass(frozen=True, slots=True)
class Goals:
    """Limits of a request's latencies in milliseconds, as far as they are given."""

    ttft_ms: float | None = None  # until the first token
    itl_ms: float | None = None  # mean between two tokens: the TPOT
    gap_ms: float | None = None  # between two messages, at this percentile of its gaps:
    gap_percentile: float = 100.0
    e2e_ms: float | None = None  # until the end of the request

    def check(self) -> None:
        for name, value in self.given().items():
            if not 0 < value < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')}: must be finite milliseconds above 0, got {value:g}")
        if self.gap_percentile != 100 and (self.gap_ms is None or math.isnan(self.gap_percentile)):
            raise ConfigError(f"--gap-percentile: must be from 0 to 100, with --gap-ms, got {self.gap_percentile:g}")

    def given(self) -> dict[str, float]:
        goals = {"ttft_ms": self.ttft_ms, "itl_ms": self.itl_ms, "gap_ms": self.gap_ms, "e2e_ms": self.e2e_ms}
        return {name: value for name, value in goals.items() if value is not None}

    def met(self, sample: Sample) -> dict[str, bool]:
        took_s = {
            "ttft_ms": sample.ttft_s if sample.times else math.inf,
            "itl_ms": sample.tpot_s or 0.0,
            "gap_ms": percentile(sorted(sample.gaps_s) or [0.0], self.gap_percentile),
            "e2e_ms": sample.e2e_s,
        }
        return {name: took_s[name] * 1e3 <= most for name, most in self.given().items()}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of ascending values, by linear interpolation."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
