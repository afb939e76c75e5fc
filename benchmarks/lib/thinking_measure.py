"""Measures accuracy, agreement and speed of engines in different thinking modes."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.lib.thinking_figures import (
    ALONE,
    AUTO,
    FAST,
    NONE,
    SEQUENTIAL,
    TOGETHER,
    UNLIMITED,
    Case,
    Measured,
    Prompts,
    Score,
    agreement,
    needed_rounds,
)
from benchmarks.lib.thinking_prompts import LOADS, mixed, stories
from benchmarks.lib.thinking_run import ask, one_by_one, thinker_of
from models.thinking_eval import samples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.engine.engine import Engine
    from benchmarks.lib.thinking_run import Prompt, Took
    from models.thinking_text import Sample

    Engines = dict[str, Engine]

FLIPS = (10, 20, 40, 60, 100)
ANSWER, CHECKED = 8, 8  # most tokens of an answer to a story, and to any other prompt


class Plan(NamedTuple):
    """Stories per number of flips, prompts to compare, prompts per load, and rounds of loads."""

    stories: int
    agreed: int
    prompts: int
    rounds: int
    sweep: Sequence[int] = ()  # numbers of cheap rows in addition to the engine's own


def score(engine: Engine, fresh: Sequence[Sample]) -> Score:
    """Score the answers to all stories."""
    tokenizer = engine.tokenizer
    answers = ask(engine, [tuple(tokenizer.encode(sample.prompt)) for sample in fresh], ANSWER).answers
    said = [tuple(tokenizer.decode(thought).strip() for thought in a.thoughts if thought) for a in answers]
    right = sum(answer.text == sample.answer for answer, sample in zip(answers, fresh, strict=True))
    return Score(right, sum(s == sample.thoughts for s, sample in zip(said, fresh, strict=True)), len(fresh))


def measure_accuracy(asked: Engines, count: int, seed: int, measured: Measured) -> None:
    """Score the same stories for all engines, by their names in the table."""
    for who, engine in asked.items():
        measured.scores[who] = {flips: score(engine, samples(flips, count, seed)) for flips in FLIPS}
        tell(f"{who}: {', '.join(f'{s.right} of {s.of}' for s in measured.scores[who].values())}")


def measure_agreement(engines: Engines, count: int, seed: int, measured: Measured) -> None:
    """Compare the modes on each prompt alone."""
    base = engines[SEQUENTIAL]
    prompts = mixed(count, seed, base.tokenizer, base.backend.vocab_size)
    arms = (SEQUENTIAL, FAST, UNLIMITED, AUTO)
    took = {mode: [turn(engines, mode, [p], TOGETHER, CHECKED) for p in prompts] for mode in arms}
    answers = {mode: [each.answers[0] for each in runs] for mode, runs in took.items()}
    predicted = [
        needed_rounds(a.thoughts, len(p), thinker_of(base).config.chunk_size)
        for a, p in zip(answers[UNLIMITED], prompts, strict=True)
    ]
    rounds = [(each.rounds, number) for each, number in zip(took[UNLIMITED], predicted, strict=True)]
    measured.agreements[FAST] = agreement(answers[SEQUENTIAL], answers[FAST])
    measured.agreements[UNLIMITED] = agreement(answers[SEQUENTIAL], answers[UNLIMITED], rounds)
    measured.agreements[AUTO] = agreement(answers[SEQUENTIAL], answers[AUTO])
    for number, prompt in enumerate(prompts):
        if any(answers[mode][number] != answers[SEQUENTIAL][number] for mode in arms):
            tell(f"prompt {number} differs: {list(prompt)}")
    tell(f"agreement: {measured.agreements}")


def measure_speed(engines: Engines, plan: Plan, seed: int, measured: Measured) -> None:
    """Time each mode in each round, after one warm-up."""
    loads = {load: stories(load, plan.prompts, seed, engines[AUTO].tokenizer) for load in LOADS}
    cases = [Case(load, way) for load in LOADS for way in (ALONE, TOGETHER)]
    order, own = random.Random(0), thinker_of(engines[AUTO]).cheap_rows
    measured.swept = {rows: AUTO if rows == own else f"{AUTO} {rows}" for rows in sorted({own, *plan.sweep})}
    modes = [SEQUENTIAL, FAST, UNLIMITED, *measured.swept.values(), NONE]
    measured.runs = {case: {mode: [] for mode in modes} for case in cases}
    for mode in modes:
        turn(engines, mode, loads[LOADS[0]], ALONE)
    for number in range(plan.rounds):
        for case in cases:
            for mode in order.sample(modes, len(modes)):
                measured.runs[case][mode].append(turn(engines, mode, loads[case.load], case.way))
        tell(f"round {number + 1} of {plan.rounds}")
    size = thinker_of(engines[AUTO]).config.chunk_size
    for load, prompts in loads.items():
        thoughts = [t for a in measured.runs[Case(load, ALONE)][AUTO][0].answers for t in a.thoughts]
        chunks = sum(-(-len(prompt) // size) for prompt in prompts)
        measured.prompts[load] = Prompts(plan.prompts, sum(map(len, prompts)), chunks, sum(map(bool, thoughts)))


def turn(engines: Engines, mode: str, prompts: Sequence[Prompt], way: str, new: int = 1) -> Took:
    """Run one mode. A number in its name replaces the engine's number of cheap rows; `unlimited` removes the limit."""
    name, _, option = mode.partition(" ")
    engine, thinker = engines[name], thinker_of(engines[name])
    own = thinker.cheap_rows, thinker.unlimited
    thinker.cheap_rows = int(option) if option.isdigit() else own[0]
    thinker.unlimited = own[1] or mode == UNLIMITED
    took = (one_by_one if way == ALONE else ask)(engine, prompts, new)
    thinker.cheap_rows, thinker.unlimited = own
    return took


def tell(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)
