"""Measurements of a model that thinks, and the figures computed from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Final, NamedTuple

from benchmarks.lib.thinking_prompts import Load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.lib.thinking_run import Answer, Took

    Thoughts = Sequence[tuple[int, ...]]

THINKS, OFF = "with thinking", "T switched off"
SEQUENTIAL: Final = "sequential"
FAST: Final = "fast"
UNLIMITED = "fast unlimited"  # algorithm 1 of the paper: each forward computes the rest of the prompt
AUTO: Final = "auto"
NONE: Final = "off"
ALONE, TOGETHER = "alone", "together"
KEYS = {THINKS: "accuracy", OFF: "control_accuracy"}


class Score(NamedTuple):
    """Number of right answers and of stories with all thoughts right, in order, out of `of` stories."""

    right: int
    thoughts_right: int
    of: int


class Agreement(NamedTuple):
    """Prompts, out of `of`, that agree with mode sequential, and that take the predicted forwards, if predicted."""

    equal: int
    rounds: int | None
    of: int

    @property
    def full(self) -> bool:
        return self.equal == self.of and self.rounds in {None, self.of}


class Case(NamedTuple):
    """Prompts of a load, in sequence or concurrently."""

    load: Load
    way: str

    def __str__(self) -> str:
        return f"{self.load}, {self.way}"


class Prompts(NamedTuple):
    """Sums over a load. Trivial thoughts do not count."""

    number: int
    tokens: int
    chunks: int
    thoughts: int


@dataclass(slots=True)
class Measured:
    """Results. `runs`: by case and mode, one per round. `swept`: modes by number of cheap rows, auto's own included."""

    scores: dict[str, dict[int, Score]] = field(default_factory=dict)
    agreements: dict[str, Agreement] = field(default_factory=dict)
    prompts: dict[Load, Prompts] = field(default_factory=dict)
    runs: dict[Case, dict[str, list[Took]]] = field(default_factory=dict)
    swept: dict[int, str] = field(default_factory=dict)

    def rounds_per_chunk(self, mode: str, loads: Sequence[Load]) -> float:
        """Return the forwards per chunk up to the first token, of prompts alone."""
        rounds = sum(self.runs[Case(load, ALONE)][mode][0].rounds for load in loads)
        return rounds / sum(self.prompts[load].chunks for load in loads)

    def ratios(self, case: Case, mode: str, base: str) -> list[float]:
        """Return seconds of `base` over those of `mode` by round. Above 1, `mode` is faster."""
        runs = self.runs[case]
        return [other.seconds / one.seconds for one, other in zip(runs[mode], runs[base], strict=True)]

    def milliseconds(self, case: Case, mode: str) -> float:
        """Return the time until all prompts of the case had their first token, per prompt if they ran alone."""
        seconds = median(took.seconds for took in self.runs[case][mode])
        return 1e3 * seconds / (self.prompts[case.load].number if case.way == ALONE else 1)

    def overall(self, mode: str, base: str) -> float:
        """Return the geometric mean of `ratios` over the cases."""
        return geometric_mean([median(self.ratios(case, mode, base)) for case in self.runs])


def needed_rounds(thoughts: Thoughts, length: int, chunk_size: int) -> int:
    """Return the forwards of mode fast without a limit: one, and one per thought with prompt positions after it."""
    return 1 + sum(bool(thought) and (chunk + 1) * chunk_size < length for chunk, thought in enumerate(thoughts))


def agreement(
    wanted: Sequence[Answer], taken: Sequence[Answer], rounds: Sequence[tuple[int, int]] | None = None
) -> Agreement:
    """Compare answers to the same prompts. `rounds`: pairs of actual and predicted forwards."""
    equal = sum(one == other for one, other in zip(wanted, taken, strict=True))
    return Agreement(equal, None if rounds is None else sum(one == other for one, other in rounds), len(wanted))


def figures(measured: Measured) -> dict[str, float | None]:
    """Return the figures by name. None means not measured."""
    found: dict[str, float | None] = {}
    for who, scores in measured.scores.items():
        for flips, score in scores.items():
            found[f"{KEYS[who]}_{flips}"] = round(score.right / score.of, 4)
            if who == THINKS:
                found[f"thoughts_right_{flips}"] = round(score.thoughts_right / score.of, 4)
    for mode, one in measured.agreements.items():
        name = mode.replace(" ", "_")
        found[f"equal_{name}"], found[f"equal_{name}_of"] = one.equal, one.of
    for filler in (True, False):
        loads = [load for load in measured.prompts if bool(load.filler) == filler]
        for mode in (AUTO, FAST, UNLIMITED):
            name = "rounds_per_chunk" + "_dense" * (not filler) + f"_{mode.replace(' ', '_')}" * (mode != AUTO)
            found[name] = round(measured.rounds_per_chunk(mode, loads), 4) if loads else None
    main = Case(Load(30, 1.0), ALONE)
    found["fast_prefill_speedup"] = _middle(measured, main, AUTO, SEQUENTIAL) if main in measured.runs else None
    for case in measured.runs:
        for mode in (FAST, UNLIMITED, AUTO):
            found[f"{case}: {mode} to sequential"] = _middle(measured, case, mode, SEQUENTIAL)
        found[f"{case}: time of auto to off"] = _middle(measured, case, NONE, AUTO)
    if len(measured.swept) > 1:
        sweep = {f"sweep: {rows}": measured.overall(mode, SEQUENTIAL) for rows, mode in measured.swept.items()}
        found |= {name: round(value, 4) for name, value in sweep.items()}
    slowest = [median(measured.ratios(case, FAST, SEQUENTIAL)) for case in measured.runs]
    found["fast_to_sequential_least"] = round(min(slowest), 4) if slowest else None
    return found


def _middle(measured: Measured, case: Case, mode: str, base: str) -> float:
    return round(median(measured.ratios(case, mode, base)), 4)
