"""The tasks by name, and the chain of thought of a sample as text."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from models import thinking_eval, thinking_text
from models.tasks import two_hop, variables
from models.thinking_text import Sample

LENGTHS = (10, 20, 40, 60, 100)
KINDS = ("thinking", "cot", "answer")


@dataclass(frozen=True, slots=True)
class Task:
    """A task. `training` takes a random source and the most idle clauses; `samples` length, number and seed.

    All kinds of a task are trained for the same number of steps, on the same prompts. `gaps`: kinds whose positions
    have gaps in training. A chain of thought that finds its next step by counting positions cannot learn with gaps.
    """

    training: Callable[[random.Random, int], Sample]
    samples: Callable[[int, int, int], list[Sample]]
    lengths: tuple[int, ...] = LENGTHS
    steps: int = 700
    batch_tokens: int = 1024
    gaps: tuple[str, ...] = ("thinking",)


TASKS = {
    "coin": Task(thinking_text.training_sample, thinking_eval.samples, steps=1100, batch_tokens=2048, gaps=KINDS),
    "variables": Task(variables.training_sample, variables.samples),
    "two-hop": Task(two_hop.training_sample, two_hop.samples, (2, *LENGTHS)),
}


def completion(sample: Sample, kind: str) -> str:
    """Return the text after the prompt: for kind `cot` all thoughts and a colon, and then the answer."""
    if kind != "cot":
        return sample.answer
    return "".join(f" {thought.strip()}" for thought in sample.thoughts) + ":" + sample.answer


def answer_of(text: str) -> str:
    """Return the answer in a completion of any kind."""
    return text.rpartition(":")[2]
