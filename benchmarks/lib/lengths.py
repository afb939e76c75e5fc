"""Lengths of prompts and answers in real conversations, from a published trace, if available."""

from __future__ import annotations

import csv
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    Lengths = tuple[tuple[int, int], ...]

LONGEST = 512, 256  # tokens of a prompt and of an answer; longer ones are cut
SHORTEST = 2  # tokens of an answer: a single one has no gap


def read_trace(path: Path) -> Lengths:
    """Return (prompt, answer) tokens of each request of an Azure LLM inference trace (`AzureLLMInferenceTrace_conv.csv`
    of Azure/AzurePublicDataset, 2023), cut to `LONGEST`. Raises OSError, or ValueError for another file.
    """
    with path.open(newline="") as file:
        rows = csv.DictReader(file, restval="")
        if not {"ContextTokens", "GeneratedTokens"} <= set(rows.fieldnames or ()):
            raise ValueError(f"{path} has no columns ContextTokens and GeneratedTokens")
        asked = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows]
    most, longest = LONGEST
    found = tuple((min(prompt, most), min(max(answer, SHORTEST), longest)) for prompt, answer in asked if prompt > 0)
    if not found:
        raise ValueError(f"{path} has no requests")
    return found


def sampled(trace: Lengths, count: int, rng: random.Random) -> Lengths:
    """Return `count` random requests, without repetition if there are enough."""
    return tuple(rng.sample(trace, count) if count <= len(trace) else rng.choices(trace, k=count))
