"""Measured times and figures computed from them, without clocks and processes.

Engines are compared within a round, so that a busy machine affects both of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.lib.points import Point
from benchmarks.lib.shapes import LABELS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BATON, LIMIT = "baton", "limit"
DECODE_GOAL, PREFILL_GOAL, OVERHEAD_GOAL = Point(128, 1), Point(512), Point(128, 16)


class Setting(NamedTuple):
    """One table: a model and a number of threads."""

    size: str
    threads: int


@dataclass(frozen=True)
class Sample:
    """One engine at one point in one round: the median seconds of a prompt or a step."""

    setting: Setting
    engine: str
    point: Point
    round: int
    seconds: float
    forward_share: float | None = None  # of the model's forward in a step, if the engine reports it


class Measured:
    """All samples of a run, by setting, engine and point."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self.samples = list(samples)
        self._times: dict[tuple[Setting, str, Point], dict[int, float]] = {}
        for sample in self.samples:
            self._times.setdefault((sample.setting, sample.engine, sample.point), {})[sample.round] = sample.seconds

    @property
    def settings(self) -> list[Setting]:
        return list(dict.fromkeys(sample.setting for sample in self.samples))

    @property
    def points(self) -> list[Point]:
        return list(dict.fromkeys(sample.point for sample in self.samples))

    @property
    def peers(self) -> list[str]:
        """Engines other than Baton and the machine's limit."""
        return [name for name in dict.fromkeys(s.engine for s in self.samples) if name not in {BATON, LIMIT}]

    def seconds(self, setting: Setting, engine: str, point: Point) -> list[float]:
        """Return the time of each round."""
        return list(self._times.get((setting, engine, point), {}).values())

    def speed(self, setting: Setting, point: Point, other: str) -> float | None:
        """Return Baton's speed as a multiple of `other`: the median over the rounds with both."""
        mine = self._times.get((setting, BATON, point), {})
        theirs = self._times.get((setting, other, point), {})
        ratios = [theirs[number] / mine[number] for number in mine if number in theirs]
        return median(ratios) if ratios else None

    def speed_vs_best(self, setting: Setting, point: Point) -> float | None:
        """Return `speed` against the fastest peer at this point."""
        return min(_known(self.speed(setting, point, peer) for peer in self.peers), default=None)

    def overhead(self, setting: Setting, point: Point) -> float | None:
        """Return the share of a step outside the model's forward."""
        shares = _known(
            s.forward_share for s in self.samples if (s.setting, s.engine, s.point) == (setting, BATON, point)
        )
        return 1.0 - median(shares) if shares else None


def ratios(measured: Measured, *, with_peers: bool) -> dict[str, float | None]:
    """Return the figures that other programs use, each the worst over the thread counts. None means not measured."""
    found: dict[str, float | None] = {
        "decode_vs_bandwidth_1b": _worst(measured, "L", lambda s: measured.speed(s, DECODE_GOAL, LIMIT)),
        "prefill_vs_gemm_1b": _worst(measured, "L", lambda s: measured.speed(s, PREFILL_GOAL, LIMIT)),
        "vs_transformers_min": min(
            _known(measured.speed(s, p, "transformers") for s in measured.settings for p in measured.points),
            default=None,
        ),
    }
    compared = with_peers and bool(set(measured.peers) - {"transformers"})
    for size in ("M", "L", "S"):
        worst = _worst(measured, size, lambda s: _worst_point(measured, s)) if compared else None
        found[f"vs_best_peer_{LABELS[size]}_min"] = worst
    overheads = _known(measured.overhead(s, OVERHEAD_GOAL) for s in measured.settings if s.size == "M")
    found["overhead_share_125m_b16"] = max(overheads, default=None)
    return {key: None if value is None else round(value, 4) for key, value in found.items()}


def _worst(measured: Measured, size: str, figure: Callable[[Setting], float | None]) -> float | None:
    return min(_known(figure(setting) for setting in measured.settings if setting.size == size), default=None)


def _worst_point(measured: Measured, setting: Setting) -> float | None:
    return min(_known(measured.speed_vs_best(setting, point) for point in measured.points), default=None)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
