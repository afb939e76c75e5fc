"""The figures of `baton bench`, as JSON values and as a table.

TTFT: from the intended send time to the first message with tokens. ITL: between two such messages. TPOT: from the first
to the last such message of a request, divided by its tokens after the first. End to end: until the request ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.bench.sample import NOT_SENT, Goals, Sample, percentile

KIND = "baton bench 1"  # marks a file as such a report
PERCENTILES = (50, 90, 95, 99)
COLUMNS = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")
ROWS = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "end to end"}
GOALS = {"ttft_ms": "TTFT", "itl_ms": "TPOT", "gap_ms": "each ITL", "e2e_ms": "end to end"}
NOTES = {NOT_SENT: " (more than --max-in-flight would have been in flight)"}
BUSY, LATE_MS = 0.8, 20.0  # share of a core, and lag of timers, above which the load generator may be too slow


@dataclass(frozen=True, slots=True)
class Generator:
    """The generator's own cost: `began` is a Unix time, `cpu_share` of one core, `lags_s` the lag of each timer."""

    began: float
    cpu_share: float
    lags_s: Sequence[float]
    unfinished: int = 0  # in flight when the run was stopped
    clipped: int = 0  # requests cut to the model's length


def report(samples: Sequence[Sample], goals: Goals, plan: Mapping[str, Any], generator: Generator) -> dict[str, Any]:
    """Return all figures, for `--json`. A distribution without values is None."""
    done = [sample for sample in samples if not sample.error]
    good = [sample for sample in done if sample.times]
    wall_s = max(sample.end for sample in samples) - min(sample.start for sample in samples)
    tokens, prompts = sum(sample.tokens for sample in done), sum(sample.prompt_tokens for sample in done)
    late_s = [sample.sent - sample.start for sample in samples if sample.sent is not None]
    return {
        "kind": KIND,
        "plan": dict(plan),
        "began": generator.began,
        "seconds": wall_s,
        "completed": len(done),
        "unfinished": generator.unfinished,
        "clipped": generator.clipped,
        "errors": dict(Counter(sample.error for sample in samples if sample.error)),
        "prompt_tokens": prompts,
        "cached_tokens": sum(sample.cached_tokens for sample in done),
        "kv_bytes": sum(sample.kv_bytes for sample in done),
        "completion_tokens": tokens,
        "messages": sum(len(sample.times) for sample in good),
        "requests_per_s": rate(len(done), wall_s),
        "tokens_per_s": rate(tokens, wall_s),
        "total_tokens_per_s": rate(tokens + prompts, wall_s),
        "ttft_ms": distribution([sample.ttft_s for sample in good]),
        "itl_ms": distribution([gap for sample in good for gap in sample.gaps_s]),
        "tpot_ms": distribution([sample.tpot_s for sample in good if sample.tpot_s is not None]),
        "e2e_ms": distribution([sample.e2e_s for sample in done]),
        "goodput": goodput(done, goals, len(samples), wall_s),
        "generator": {
            "cpu_share": generator.cpu_share,
            "late_p99_s": percentile(sorted(late_s) or [0.0], 99),
            "lag_ms": distribution(generator.lags_s),
        },
    }


def rate(count: int, seconds: float) -> float:
    """Return the count per second, or 0 for no time."""
    return count / seconds if seconds > 0 else 0.0


def goodput(done: Sequence[Sample], goals: Goals, sent: int, wall_s: float) -> dict[str, Any] | None:
    """Return requests that met all goals, as a rate and a share, and the share for each goal, or None without goals."""
    if not goals.given():
        return None
    met = [goals.met(sample) for sample in done]
    whole = sum(all(each.values()) for each in met)
    attained = {name: sum(each[name] for each in met) / sent for name in goals.given()}
    given = goals.given() | ({"gap_percentile": goals.gap_percentile} if goals.gap_ms is not None else {})
    return {**given, "requests_per_s": rate(whole, wall_s), "share": whole / sent, "attained": attained}


def distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return mean, interpolated percentiles and maximum in milliseconds, or None without values."""
    if not seconds:
        return None
    ordered = sorted(value * 1e3 for value in seconds)
    points = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return {"mean": sum(ordered) / len(ordered), **points, "max": ordered[-1]}


def table(found: Mapping[str, Any]) -> str:
    """Format a report for people."""
    failed = sum(found["errors"].values())
    unfinished = f", {found['unfinished']} not finished" if found["unfinished"] else ""
    lines = [f"{found['completed']} requests completed, {failed} failed{unfinished}, in {found['seconds']:.2f} s"]
    lines += [f"  {count} {kind}{NOTES.get(kind, '')}" for kind, count in sorted(found["errors"].items())]
    if found["clipped"]:
        lines.append(f"  {found['clipped']} were cut to the model's length")
    lines.append(
        f"{found['requests_per_s']:.2f} requests/s, {found['tokens_per_s']:.1f} new tokens/s, "
        f"{found['total_tokens_per_s']:.1f} tokens/s with prompts"
    )
    lines += _prefix_line(found)
    lines.append(f"{'ms':<12}" + "".join(f"{column:>10}" for column in COLUMNS))
    lines += [f"{label:<12}" + _cells(found[key]) for key, label in ROWS.items()]
    if found["goodput"]:
        lines += goal_lines(found["goodput"])
    return "\n".join([*lines, own_line(found["generator"])])


def _prefix_line(found: Mapping[str, Any]) -> list[str]:
    """Return the share of prompt tokens from a prefix cache, and the moved KV, if there was any of either."""
    parts = []
    if found["cached_tokens"]:
        parts.append(f"{found['cached_tokens'] / found['prompt_tokens']:.1%} of prompt tokens from a prefix cache")
    if found["kv_bytes"]:
        parts.append(f"{found['kv_bytes'] / 1e6:.2f} MB of KV moved")
    return [", ".join(parts)] if parts else []


def _cells(values: Mapping[str, float] | None) -> str:
    return "".join(f"{values[column]:>10.2f}" if values else f"{'-':>10}" for column in COLUMNS)


def goal_lines(found: Mapping[str, Any]) -> list[str]:
    """Format the goodput with its goals, and each goal's share if there are several."""
    attained = found["attained"]
    tail = found.get("gap_percentile", 100)
    names = GOALS if tail == 100 else GOALS | {"gap_ms": f"p{tail:g} of a request's ITL"}
    goals = [f"{names[name]} <= {found[name]:g} ms" for name in attained]
    lines = [
        f"goodput {found['requests_per_s']:.2f} requests/s, {found['share']:.1%} of all, with {' and '.join(goals)}"
    ]
    if len(attained) > 1:
        shares = (f"{share:.1%} {goal}" for goal, share in zip(goals, attained.values(), strict=True))
        lines.append(f"  alone: {', '.join(shares)}")
    return lines


def own_line(found: Mapping[str, Any]) -> str:
    """Format the load generator's cost. A busy generator may have caused the measured latencies itself."""
    lag = found["lag_ms"]
    parts = [f"load generator: {found['cpu_share']:.0%} of a core"]
    parts += [f"requests sent {found['late_p99_s'] * 1e3:.1f} ms late (p99)"]
    parts += [f"timers {lag['p99']:.1f} ms late (p99)"] if lag else []
    slow = found["cpu_share"] > BUSY or (lag is not None and lag["p99"] > LATE_MS)
    return ", ".join(parts) + (": TOO BUSY, latencies may be its own" if slow else "")
