"""Three ways to an answer on three tasks: thinking states, a chain of thought in text, or neither."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.lib.thinking_figures import ALONE, AUTO, TOGETHER, Score
from benchmarks.lib.thinking_run import ask, engine_of, one_by_one
from models.tasks.registry import KINDS, TASKS, answer_of, completion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from baton.engine.engine import Engine
    from benchmarks.lib.thinking_run import Prompt
    from models.thinking_text import Sample

THINKING, COT, ANSWER = KINDS
TIMED = (10, 40, 100)  # steps
SPARE = 8  # tokens that an answer may have beyond the right completion, so that a wrong one ends


class Timing(NamedTuple):
    """Prompts of one task and number of steps, alone or together."""

    task: str
    steps: int
    way: str

    def __str__(self) -> str:
        return f"{self.task}, {self.steps} steps, {self.way}"


@dataclass(slots=True)
class Compared:
    """Results by task and kind. `seconds`: from the first prompt to the end of the last answer, one per round."""

    scores: dict[tuple[str, str], dict[int, Score]] = field(default_factory=dict)
    seconds: dict[Timing, dict[str, list[float]]] = field(default_factory=dict)
    written: dict[tuple[str, int, str], float] = field(
        default_factory=dict
    )  # tokens of an answer, by task, steps, kind
    prompts: int = 0  # of each timing

    def milliseconds(self, timing: Timing, kind: str) -> float:
        """Return the time per answer of prompts alone, or the time of all answers to prompts together."""
        return 1e3 * median(self.seconds[timing][kind]) / (self.prompts if timing.way == ALONE else 1)

    def ratios(self, timing: Timing, base: str) -> list[float]:
        """Return by round how many times faster thinking states are than `base`."""
        took = self.seconds[timing]
        return [other / one for one, other in zip(took[THINKING], took[base], strict=True)]

    def speedup(self, task: str | None = None) -> float | None:
        """Return the geometric mean over numbers of steps of prompts alone, against the chain of thought."""
        cases = [t for t, took in self.seconds.items() if t.way == ALONE and {THINKING, COT} <= took.keys()]
        found = [median(self.ratios(timing, COT)) for timing in cases if task in {None, timing.task}]
        return geometric_mean(found) if found else None


def found_in(folder: Path | None, coin: Path) -> dict[tuple[str, str], Path]:
    """Return the trained models by task and kind: `coin`, and the folders TASK-KIND of `folder`."""
    found = {("coin", THINKING): coin}
    for task in TASKS if folder is not None else ():
        for kind in KINDS:
            place = folder / f"{task}-{kind}" if folder is not None else coin
            if (task, kind) not in found and (place / "model.safetensors").exists():
                found[task, kind] = place
    return found


def compare(folders: Mapping[tuple[str, str], Path], stories: int, prompts: int, rounds: int, seed: int) -> Compared:
    """Score every model on `stories` samples of each length, and time `rounds` rounds of `prompts` prompts."""
    engines = {key: engine_of(folder, AUTO) for key, folder in folders.items()}
    compared = Compared(prompts=prompts)
    for (task, kind), engine in engines.items():
        compared.scores[task, kind] = {
            steps: score(engine, TASKS[task].samples(steps, stories, seed), kind) for steps in TASKS[task].lengths
        }
    order = random.Random(0)
    for _ in range(rounds):
        for task in dict.fromkeys(task for task, _ in engines):
            _time(task, {kind: engine for (of, kind), engine in engines.items() if of == task}, seed, order, compared)
    return compared


def score(engine: Engine, fresh: Sequence[Sample], kind: str) -> Score:
    """Score the answers. Thoughts in text do not count."""
    most = _most(engine, fresh, kind)
    answers = ask(engine, [tuple(engine.tokenizer.encode(sample.prompt)) for sample in fresh], most).answers
    right = sum(answer_of(a.text) == sample.answer for a, sample in zip(answers, fresh, strict=True))
    return Score(right, 0, len(fresh))


def _most(engine: Engine, fresh: Sequence[Sample], kind: str) -> int:
    return SPARE + max(len(engine.tokenizer.encode(completion(sample, kind))) for sample in fresh)


def _time(task: str, engines: Mapping[str, Engine], seed: int, order: random.Random, compared: Compared) -> None:
    """Add one round: every kind answers the same prompts, in a new order."""
    for steps in TIMED:
        fresh = TASKS[task].samples(steps, compared.prompts, seed)
        for way in (ALONE, TOGETHER):
            took = compared.seconds.setdefault(Timing(task, steps, way), {kind: [] for kind in engines})
            for kind in order.sample(list(engines), len(engines)):
                engine = engines[kind]
                prompts: list[Prompt] = [tuple(engine.tokenizer.encode(sample.prompt)) for sample in fresh]
                found = (one_by_one if way == ALONE else ask)(engine, prompts, _most(engine, fresh, kind))
                took[kind].append(found.ended)
                written = sum(len(answer.tokens) for answer in found.answers) / len(fresh)
                compared.written[task, steps, kind] = written


def figures(compared: Compared) -> dict[str, float | None]:
    """Return the figures by name. None means that a model was not given."""
    found: dict[str, float | None] = {}
    for (task, kind), scores in compared.scores.items():
        for steps, one in scores.items():
            found[f"{task}_{kind}_{steps}"] = round(one.right / one.of, 4)
    for steps in TASKS["coin"].lengths:
        found[f"cot_accuracy_{steps}"] = found.get(f"coin_{COT}_{steps}")
    speedups = {"speedup_vs_cot": compared.speedup()}
    speedups |= {f"speedup_vs_cot_{task}": compared.speedup(task) for task in TASKS}
    found |= {name: None if value is None else round(value, 4) for name, value in speedups.items()}
    return found
