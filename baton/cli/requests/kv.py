"""`--show kv`: the KV length after each step of a request, as its workers reported it in their spans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from baton.errors import EngineFault

if TYPE_CHECKING:
    from baton.client import Choice, Completion, Delta

ATTRIBUTE = "kv_lengths"


@dataclass(frozen=True, slots=True)
class KvStep:
    """One step of a request on a worker: `length` positions have KV after it."""

    worker: str
    attempt: int
    choice: int
    length: int


def kv_steps(completion: Completion) -> list[KvStep]:
    """Return the steps of all spans in order. Raises EngineFault for an attribute that has no lengths."""
    return [
        KvStep(span.process, span.attempt, span.choice, length)
        for span in completion.trace
        for length in lengths_of(span.attributes.get(ATTRIBUTE, ""))
    ]


def lengths_of(text: str) -> Iterator[int]:
    """Yield the lengths of an attribute such as `256 512 600-640`. Raises EngineFault for another text."""
    for run in text.split():
        first, _, last = run.partition("-")
        try:
            yield from range(int(first), int(last or first) + 1)
        except ValueError:
            raise EngineFault(f"{ATTRIBUTE}: must be numbers and ranges of them, got {text!r}") from None


def texts_of(delta: Delta) -> dict[tuple[int, int], str]:
    """Return the text of each token of a stream message, by choice and index."""
    found, at = {}, 0
    for place, length in enumerate(delta.lengths or [len(delta.text)] * len(delta.tokens)):
        found[delta.choice, delta.start + place] = delta.text[at : at + length]
        at += length
    return found


def show_kv(completion: Completion, texts: Mapping[tuple[int, int], str]) -> None:
    """Print a line for each step. `texts` has the text of tokens by choice and index, as far as it is known."""
    for step in kv_steps(completion):
        answer = f", answer {step.choice}" if step.choice else ""
        place, choice = step.length - completion.usage.prompt_tokens, completion.choices[step.choice]
        typer.echo(
            f"kv        {step.length} on {step.worker}{answer}: {_then(choice, place, texts.get((step.choice, place)))}"
        )


def _then(choice: Choice, place: int, text: str | None) -> str:
    """Return what follows the step behind which output token `place` is sampled."""
    if place < 0:
        return "a part of the prompt"
    if place < len(choice.tokens):
        return f"token {choice.tokens[place]}" + (f" {text!r}" if text else "")
    return f"end, {choice.finish_reason}"
