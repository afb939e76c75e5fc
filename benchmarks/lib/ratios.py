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
    from collections.abc import Callable, Iterable, Sequence

BATON, LIMIT, REFERENCE = "baton", "limit", "bf16"
WIDE, QUANTIZED = ("bf16", "fp32"), ("int8", "int4")
DECODE_GOAL, PREFILL_GOAL, OVERHEAD_GOAL = Point(128, 1), Point(512), Point(128, 16)


def own(level: str, dtype: str = "") -> str:
    """Return the name of one of Baton's engines, in `dtype` instead of the setting's."""
    return " ".join(filter(None, (BATON, dtype, "" if level == "native" else level)))


def is_baton(engine: str) -> bool:
    """Return whether `engine` is one of Baton's."""
    return engine.split(maxsplit=1)[0] == BATON


class Setting(NamedTuple):
    """One table: a model, a number of threads, and the weights."""

    size: str
    threads: int
    dtype: str = "bf16"


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
        names = dict.fromkeys(s.engine for s in self.samples)
        return [name for name in names if name != LIMIT and not is_baton(name)]

    @property
    def own(self) -> list[str]:
        """Baton's engines: `baton`, then those of other levels and weights."""
        return [name for name in dict.fromkeys(s.engine for s in self.samples) if is_baton(name)]

    def seconds(self, setting: Setting, engine: str, point: Point) -> list[float]:
        """Return the time of each round."""
        return list(self._times.get((setting, engine, point), {}).values())

    def speed(self, setting: Setting, point: Point, other: str, engine: str = BATON) -> float | None:
        """Return the speed of `engine` as a multiple of `other`: the median over the rounds with both."""
        mine = self._times.get((setting, engine, point), {})
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
        found[f"vs_best_peer_{LABELS[size]}_min"] = _vs_best(measured, size, WIDE) if compared else None
        if compared and any(setting.size == size for setting in measured.settings):
            name = f"vs_best_peer_{LABELS[size]}_min"
            found |= {f"{name}_{dtype}": _vs_best(measured, size, (dtype,)) for dtype in WIDE}
    overheads = _known(measured.overhead(s, OVERHEAD_GOAL) for s in measured.settings if s[::2] == ("M", REFERENCE))
    found["overhead_share_125m_b16"] = max(overheads, default=None)
    for setting in measured.settings:
        for engine in measured.own:
            found |= _of_weights(measured, setting, engine)
    return {key: None if value is None else round(value, 4) for key, value in found.items()}


def _worst(measured: Measured, size: str, figure: Callable[[Setting], float | None]) -> float | None:
    chosen = (setting for setting in measured.settings if setting.size == size and setting.dtype == REFERENCE)
    return min(_known(map(figure, chosen)), default=None)


def _vs_best(measured: Measured, size: str, dtypes: Sequence[str]) -> float | None:
    """Return the worst point of Baton with the fastest of `dtypes` against peers with the faster of fp32 and bf16.

    Within one dtype, engines are compared within rounds. Dtypes are compared by medians.
    """
    threads = {setting.threads for setting in measured.settings if setting.size == size}
    found = [
        _best_point(measured, Setting(size, count), point, dtypes) for count in threads for point in measured.points
    ]
    return min(_known(found), default=None)


def _best_point(measured: Measured, at: Setting, point: Point, dtypes: Sequence[str]) -> float | None:
    settings = [at._replace(dtype=dtype) for dtype in WIDE]
    times = {s: measured.seconds(s, BATON, point) for s in settings if s.dtype in dtypes}
    mine = [(median(seconds), setting) for setting, seconds in times.items() if seconds]
    if not mine:
        return None
    least, best = min(mine)
    others = [measured.seconds(s, peer, point) for s in settings if s != best for peer in measured.peers]
    across = [median(seconds) / least for seconds in others if seconds]
    return min([*_known([measured.speed_vs_best(best, point)]), *across], default=None)


def _of_weights(measured: Measured, setting: Setting, engine: str) -> dict[str, float | None]:
    """Return the figures of one engine of Baton with the weights of `setting`."""
    level = engine.removeprefix(BATON).strip()
    if level.startswith(REFERENCE):
        return {}
    name = f"{LABELS[setting.size]}_{setting.threads}t_{level or 'native'}"
    reference = own(level or "native", REFERENCE)
    found: dict[str, float | None] = {}
    for point in measured.points:
        compared = {LIMIT: measured.speed(setting, point, LIMIT, engine)}
        if setting.dtype in QUANTIZED:
            compared["bf16"] = measured.speed(setting, point, reference, engine)
        compared |= {peer: measured.speed(setting, point, peer, engine) for peer in measured.peers}
        found |= {f"{setting.dtype}_vs_{other}_{name}_{point}": value for other, value in compared.items()}
    return {key: value for key, value in found.items() if value is not None}


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
