"""Table and ratios of runs of one load with different shares of deterministic requests."""

from __future__ import annotations

from statistics import median, quantiles
from typing import TYPE_CHECKING

from benchmarks.lib.report import markdown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.lib.determinism_run import Took

    Runs = Mapping[str, Sequence[Took]]

HEADER = ("", "tokens/s", "of 0 % (spread)", "verify passes", "recomputed")
TIMES = ("TTFT", "ITL", "E2E")
KEYS = (
    *("throughput_10", "throughput_50", "throughput_100"),
    # tests/e2e/test_determinism.py counts control_diverged.
    *("recomputed_share_100", "ttft_p99_ratio_100", "control_diverged"),
)


def table(runs: Runs) -> str:
    """Return a line per variant. The first variant is the baseline, round by round."""
    header = [*HEADER, *(f"{name}, ms" for name in TIMES), "p99 TTFT of 0 %"]
    return markdown(header, [_row(name, taken, _first(runs)) for name, taken in runs.items()])


def figures(runs: Runs, prefix: str = "") -> dict[str, float]:
    """Return throughput and p99 TTFT by variant, as ratios to the first: medians over the rounds."""
    base, found = _first(runs), dict[str, float]()
    for name, taken in runs.items():
        found[prefix + name] = round(median(_ratios(taken, base, _speed)), 4)
        if _comparable(taken, base):
            found[f"{prefix}{name}, p99 TTFT"] = round(median(_ratios(taken, base, _slowest_ttft)), 4)
    return found


def ratios(runs: Runs) -> dict[str, float | None]:
    """Return the ratios that other programs use, with verify passes if a share was not measured without."""
    found: dict[str, float | None] = dict.fromkeys(KEYS)
    for share in (10, 50, 100):
        for name in (f"{share}% deterministic", f"{share}% deterministic, verify passes"):
            if name in runs and found[f"throughput_{share}"] is None:
                found[f"throughput_{share}"] = round(median(_ratios(runs[name], _first(runs), _speed)), 4)
    all_of_them = runs.get("100% deterministic, verify passes")
    if all_of_them:
        again = median(one.counters.recomputed_tokens / one.tokens for one in all_of_them)
        found["recomputed_share_100"] = round(again, 4)
        if _comparable(all_of_them, _first(runs)):
            found["ttft_p99_ratio_100"] = round(median(_ratios(all_of_them, _first(runs), _slowest_ttft)), 4)
    return found


def _first(runs: Runs) -> Sequence[Took]:
    return next(iter(runs.values()))


def _row(name: str, taken: Sequence[Took], base: Sequence[Took]) -> list[str]:
    ratios = _ratios(taken, base, _speed)
    again = median(one.counters.recomputed_tokens / one.tokens for one in taken)
    times = ([s for one in taken for s in values(one)] for values in (_ttft, _itl, _e2e))
    return [
        name,
        f"{median(map(_speed, taken)):,.0f}",
        f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
        f"{median(one.counters.verify_passes for one in taken):.0f}",
        f"{again:.1%}",
        *map(_times, times),
        f"{median(_ratios(taken, base, _slowest_ttft)):.2f}" if _comparable(taken, base) else "-",
    ]


def _comparable(taken: Sequence[Took], base: Sequence[Took]) -> bool:
    """Return whether equally many requests waited, because the last request of a shorter queue waits less."""
    return len(taken[0].ttft_s) == len(base[0].ttft_s)


def _ratios(taken: Sequence[Took], base: Sequence[Took], value: Callable[[Took], float]) -> list[float]:
    return [value(one) / value(other) for one, other in zip(taken, base, strict=True)]


def _speed(took: Took) -> float:
    return took.tokens_per_s


def _slowest_ttft(took: Took) -> float:
    return _p99(took.ttft_s)


def _ttft(took: Took) -> list[float]:
    return took.ttft_s


def _itl(took: Took) -> list[float]:
    return took.itl_s


def _e2e(took: Took) -> list[float]:
    return took.e2e_s


def _p99(seconds: list[float]) -> float:
    return quantiles(seconds, n=100, method="inclusive")[98]


def _times(seconds: list[float]) -> str:
    return f"{median(seconds) * 1e3:,.0f} / {_p99(seconds) * 1e3:,.0f}"
