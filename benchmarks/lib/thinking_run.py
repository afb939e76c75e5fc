"""One engine in some thinking mode: its answers and thoughts, and the time of the prompts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.core import HandoffId, Sampling, SequenceSpec
from baton.engine.engine import Engine
from baton.engine.models.loading import load_model
from baton.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from baton.engine.models.thinking import Mode, Thinker

    Prompt = tuple[int, ...]

BLOCKS, RUNNING = 2048, 16


@dataclass(slots=True)
class Answer:
    """Answer to one prompt: new tokens, their text, and the thought about each whole chunk (empty if trivial)."""

    tokens: list[int] = field(default_factory=list)
    thoughts: list[tuple[int, ...]] = field(default_factory=list)
    text: str = ""


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds and forwards until all prompts had their first token, and the answers in the order of the prompts.

    `ended`: seconds until the end of the last answer.
    """

    seconds: float
    rounds: int
    answers: Sequence[Answer]
    ended: float


def engine_of(folder: Path, mode: Mode) -> Engine:
    """Return an engine without a prefix cache. Mode auto estimates the number of cheap rows itself."""
    backend = load_model(folder, thinking=mode)
    return Engine(backend, load_tokenizer(folder), total_blocks=BLOCKS, max_running=RUNNING, prefix_cache=False)


def thinker_of(engine: Engine) -> Thinker:
    """Return the model's thinker. Raises ValueError if the model does not think."""
    if (thinker := engine.backend.thinker) is None:
        raise ValueError(f"{engine.backend.name} does not think")
    return thinker


def ask(engine: Engine, prompts: Sequence[Prompt], new: int = 1) -> Took:
    """Run all prompts concurrently, greedily. Raises RuntimeError if the engine fails on one."""
    answers, waiting, rounds, seconds = [Answer() for _ in prompts], set(range(len(prompts))), 0, 0.0
    began = time.perf_counter()
    for number, prompt in enumerate(prompts):
        spec = SequenceSpec(prompt, Sampling(max_tokens=new, temperature=0.0))
        engine.submit(HandoffId(str(number), 1), spec)
    while engine.has_work():
        result = engine.step()
        rounds += bool(waiting)
        if result.failed:
            raise RuntimeError(f"the engine cannot go on: {result.failed}")
        for key, thoughts in result.thoughts:
            answers[int(key.request_id)].thoughts += [thought.token_ids for thought in thoughts]
        for output in result.outputs:
            number = int(output.key.request_id)
            answers[number].tokens += [token.token_id for token in output.tokens]
            answers[number].text += "".join(token.text for token in output.tokens)
            answers[number].text += "" if output.finish is None else output.finish.tail
            waiting.discard(number)
        if not (waiting or seconds):
            seconds = time.perf_counter() - began
    return Took(seconds, rounds, answers, time.perf_counter() - began)


def one_by_one(engine: Engine, prompts: Sequence[Prompt], new: int = 1) -> Took:
    """Run each prompt alone, and sum seconds and rounds."""
    each = [ask(engine, [prompt], new) for prompt in prompts]
    answers = [took.answers[0] for took in each]
    seconds, ended = sum(took.seconds for took in each), sum(took.ended for took in each)
    return Took(seconds, sum(took.rounds for took in each), answers, ended)
