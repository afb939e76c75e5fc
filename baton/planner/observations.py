"""Measurements that `baton profile --live` takes of a cluster in several rounds, and a filter for disturbed ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import TypeVar

from baton.core import Pace
from baton.planner.fit import Gaps

SHORT = 16  # tokens of a prompt
BESIDE = 4  # sequences that decode while prompts are computed
AS_USUAL = 1.25  # times the median round; slower measurements were disturbed

Part = TypeVar("Part")


@dataclass(slots=True)
class Seen:
    """One request: send time, token times on the same clock, and the `worker` that computed its prompt."""

    sent: float
    times: list[float] = field(default_factory=list)
    worker: str = ""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Requests with prompts of one length, sent one by one, and the step totals that workers reported for them."""

    length: int
    seen: tuple[Seen, ...]
    pace: Pace

    @property
    def seconds(self) -> float:
        """Seconds per step, or 0.0 if no step computed only prompts."""
        return seconds_a_step(self.pace)


@dataclass(slots=True)
class Measured:
    """All measurements. Lists have an entry per round."""

    single: dict[int, list[Prompts]] = field(default_factory=dict)
    together: dict[tuple[int, int], list[Gaps]] = field(default_factory=dict)
    busy: list[Gaps] = field(default_factory=list)  # decoding while (other) workers computed prompts
    busy_prompts: list[Pace] = field(default_factory=list)  # these prompts
    alone: list[Gaps] = field(default_factory=list)  # one worker with both roles decoded and all others were idle
    joint: Pace = field(default_factory=Pace)  # prompts of mixed steps
    beside: Pace = field(default_factory=Pace)  # decoding sequences of mixed steps

    @property
    def parts(self) -> int:
        """Number of measurements, without mixed steps."""
        parts = sum(map(len, self.single.values())) + sum(map(len, self.together.values()))
        return parts + len(self.busy) + len(self.busy_prompts) + len(self.alone)

    def undisturbed(self) -> Measured:
        """Return the measurements without those far above the median round (the faster one of two), because other work
        comes in bursts and only slows down. Mixed steps vary from round to round, so all are kept.
        """
        return Measured(
            single={length: usual(parts, lambda one: one.seconds) for length, parts in self.single.items()},
            together={key: usual(parts, _mean) for key, parts in self.together.items()},
            busy=usual(self.busy, _mean),
            busy_prompts=usual(self.busy_prompts, seconds_a_step),
            alone=usual(self.alone, _mean),
            joint=self.joint,
            beside=self.beside,
        )


def usual(parts: Sequence[Part], seconds: Callable[[Part], float]) -> list[Part]:
    """Return the parts that took at most `AS_USUAL` times the median of all parts above 0 seconds."""
    most = AS_USUAL * median_low([seconds(one) for one in parts if seconds(one)] or [0.0])
    return [one for one in parts if seconds(one) <= most]


def together(seen: Sequence[Seen], rows: int, length: int) -> Gaps:
    """Return the gaps from the last request's first token to the first request's end, or all gaps if none."""
    begin, end = max(one.times[0] for one in seen), min(one.times[-1] for one in seen)
    kept = [
        later - earlier
        for one in seen
        for earlier, later in zip(one.times[1:], one.times[2:], strict=False)
        if begin <= earlier and later <= end
    ]
    every = kept or [later - earlier for one in seen for earlier, later in zip(one.times, one.times[1:], strict=False)]
    tokens = sum(len(one.times) for one in seen) / len(seen)
    return Gaps(rows, rows * (length + tokens / 2), tuple(every))


def summed(*paces: Pace) -> Pace:
    """Return the totals of several paces."""
    return Pace(
        sum(one.steps for one in paces),
        sum(one.tokens for one in paces),
        sum(one.context for one in paces),
        sum(one.seconds for one in paces),
    )


def seconds_a_step(pace: Pace) -> float:
    """Return the mean seconds per step, or 0.0 without steps."""
    return pace.seconds / pace.steps if pace.steps else 0.0


def _mean(gaps: Gaps) -> float:
    return gaps.mean
