"""What clients saw of loads that never were, for the tests of benchmarks/disaggregation.py."""

from __future__ import annotations

from benchmarks.lib.disagg_figures import Phase, Seen, Slo

SLO = Slo(1.0, 0.05)


def seen(ttft_s: float, *gaps_s: float) -> Seen:
    return Seen(64, ttft_s, gaps_s)


def phase(side: str, rate: float = 2.0, number: int = 1, answers: tuple[Seen, ...] = (), sent: int = 0) -> Phase:
    return Phase(side, rate, number, 10.0, sent or len(answers), answers, 0.1, 0.001)
