"""What `baton profile --live` sees of a cluster, round by round, and which of it was not disturbed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import TypeVar

from baton.core import Pace
from baton.planner.fit import Gaps

SHORT = 16  # tokens of a prompt
BESIDE = 4  # rows that decode while prompts are computed
AS_USUAL = 1.25  # times what a measurement takes in the median round: what takes longer was disturbed

Part = TypeVar("Part")


@dataclass(slots=True)
class Seen:
    """One request: when its tokens came, of the clock that also says when it was `sent`, and which `worker` computed
    its prompt.
    """

    sent: float
    times: list[float] = field(default_factory=list)
    worker: str = ""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Some of one length, one by one, and what workers say of their steps."""

    length: int
    seen: tuple[Seen, ...]
    pace: Pace

    @property
    def seconds(self) -> float:
        """Of a step. 0.0: none computed only prompts."""
        return seconds_a_step(self.pace)


@dataclass(slots=True)
class Measured:
    """All that was seen: lists have a part of each round. `busy`, `busy_prompts`: decoding while prompts were computed,
    and these prompts; of several workers that do both only where one decoded and another one computed. `alone`: where
    one of these decoded and nothing else was done. `joint`, `beside`: steps of both kinds, and what these decoded.
    """

    single: dict[int, list[Prompts]] = field(default_factory=dict)
    together: dict[tuple[int, int], list[Gaps]] = field(default_factory=dict)
    busy: list[Gaps] = field(default_factory=list)
    busy_prompts: list[Pace] = field(default_factory=list)
    alone: list[Gaps] = field(default_factory=list)
    joint: Pace = field(default_factory=Pace)
    beside: Pace = field(default_factory=Pace)

    @property
    def parts(self) -> int:
        """How many measurements these are; what steps of both kinds took is none of them."""
        parts = sum(map(len, self.single.values())) + sum(map(len, self.together.values()))
        return parts + len(self.busy) + len(self.busy_prompts) + len(self.alone)

    def undisturbed(self) -> Measured:
        """Without what took far longer than the same did in the median round (of two, the faster one): other work of
        the machine comes in bursts, and makes nothing faster. Steps of both kinds differ from round to round: all are
        kept.
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
    """Those that did not take far longer than the median one of those that took any time."""
    most = AS_USUAL * median_low([seconds(one) for one in parts if seconds(one)] or [0.0])
    return [one for one in parts if seconds(one) <= most]


def together(seen: Sequence[Seen], rows: int, length: int) -> Gaps:
    """The gaps from when the last of them had begun until the first one ended."""
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
    """All of these steps."""
    return Pace(
        sum(one.steps for one in paces),
        sum(one.tokens for one in paces),
        sum(one.context for one in paces),
        sum(one.seconds for one in paces),
    )


def seconds_a_step(pace: Pace) -> float:
    """0.0: there was none."""
    return pace.seconds / pace.steps if pace.steps else 0.0


def _mean(gaps: Gaps) -> float:
    return gaps.mean
