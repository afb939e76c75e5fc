"""What `baton bench` has seen, as numbers and as a table.

TTFT: from sending to the first message with tokens. ITL: between two such messages. TPOT: of one request, from its
first to its last message, divided by the tokens after the first. End to end: until the request had ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PERCENTILES = (50, 90, 95, 99)
ROWS = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "end to end"}


@dataclass(slots=True)
class Sample:
    """One request: times in seconds, of one clock. `error` is the class of what ended it, "" if nothing did."""

    start: float
    end: float = 0.0
    times: list[float] = field(default_factory=list)  # of each message with tokens
    prompt_tokens: int = 0
    tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.start

    @property
    def tpot_s(self) -> float | None:
        """None with fewer than two tokens."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Goals:
    """A request is good if its first token came within `ttft_ms` and its TPOT is within `itl_ms`."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def met(self, sample: Sample) -> bool:
        late = self.ttft_ms is not None and sample.ttft_s * 1e3 > self.ttft_ms
        slow = self.itl_ms is not None and (sample.tpot_s or 0.0) * 1e3 > self.itl_ms
        return not late and not slow


def report(samples: Sequence[Sample], goals: Goals, plan: dict[str, Any]) -> dict[str, Any]:
    """All numbers, for `--json`. A distribution without values is None."""
    good = [sample for sample in samples if not sample.error and sample.times]
    wall_s = max(sample.end for sample in samples) - min(sample.start for sample in samples)
    tokens, prompts = sum(sample.tokens for sample in good), sum(sample.prompt_tokens for sample in good)
    completed = sum(not sample.error for sample in samples)
    return {
        "plan": plan,
        "seconds": wall_s,
        "completed": completed,
        "errors": dict(Counter(sample.error for sample in samples if sample.error)),
        "prompt_tokens": prompts,
        "completion_tokens": tokens,
        "requests_per_s": rate(completed, wall_s),
        "tokens_per_s": rate(tokens, wall_s),
        "total_tokens_per_s": rate(tokens + prompts, wall_s),
        "ttft_ms": distribution([sample.ttft_s for sample in good]),
        "itl_ms": distribution([gap for sample in good for gap in sample.gaps_s]),
        "tpot_ms": distribution([sample.tpot_s for sample in good if sample.tpot_s is not None]),
        "e2e_ms": distribution([sample.end - sample.start for sample in good]),
        "goodput": goodput(good, goals, len(samples), wall_s),
    }


def rate(count: int, seconds: float) -> float:
    """Per second; 0 for no time."""
    return count / seconds if seconds > 0 else 0.0


def goodput(good: Sequence[Sample], goals: Goals, sent: int, wall_s: float) -> dict[str, float | None] | None:
    """Requests that met the goals, per second and as a share of all that were sent; None without goals."""
    if goals == Goals():
        return None
    met = sum(goals.met(sample) for sample in good)
    return {
        "ttft_ms": goals.ttft_ms,
        "itl_ms": goals.itl_ms,
        "requests_per_s": rate(met, wall_s),
        "share": met / sent,
    }


def distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles (between two values: in proportion) and maximum, in milliseconds."""
    if not seconds:
        return None
    ordered = sorted(value * 1e3 for value in seconds)
    points = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return {"mean": sum(ordered) / len(ordered), **points, "max": ordered[-1]}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in ascending order."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def table(found: dict[str, Any]) -> str:
    """For people."""
    failed = sum(found["errors"].values())
    lines = [f"{found['completed']} requests completed, {failed} failed, in {found['seconds']:.2f} s"]
    lines += [f"  {count} {kind}" for kind, count in sorted(found["errors"].items())]
    lines.append(
        f"{found['requests_per_s']:.2f} requests/s, {found['tokens_per_s']:.1f} new tokens/s, "
        f"{found['total_tokens_per_s']:.1f} tokens/s with prompts"
    )
    columns = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")
    lines.append(f"{'ms':<12}" + "".join(f"{column:>10}" for column in columns))
    for key, label in ROWS.items():
        values = found[key]
        cells = [f"{values[column]:>10.2f}" if values else f"{'-':>10}" for column in columns]
        lines.append(f"{label:<12}" + "".join(cells))
    if found["goodput"]:
        lines.append(goal_line(found["goodput"]))
    return "\n".join(lines)


def goal_line(found: dict[str, float | None]) -> str:
    """The goodput, with the goals that it is about."""
    named = (("TTFT", found["ttft_ms"]), ("TPOT", found["itl_ms"]))
    goals = " and ".join(f"{name} <= {value:g} ms" for name, value in named if value is not None)
    return f"goodput {found['requests_per_s']:.2f} requests/s, {found['share']:.1%} of all, with {goals}"
