"""How long prompts and answers of real conversations are: from a trace that was published, if it is here."""

from __future__ import annotations

import csv
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    Lengths = tuple[tuple[int, int], ...]

LONGEST = 512, 256  # tokens of a prompt, and of an answer: what is longer is cut to this
SHORTEST = 2  # tokens of an answer: one alone has no gap between tokens


def read_trace(path: Path) -> Lengths:
    """(prompt, answer) in tokens of each request of an Azure LLM inference trace (`AzureLLMInferenceTrace_conv.csv` of
    Azure/AzurePublicDataset, 2023), cut to `LONGEST`. Raises OSError, or ValueError for a file that is none.
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
    """So many of them, none twice as long as there are enough."""
    return tuple(rng.sample(trace, count) if count <= len(trace) else rng.choices(trace, k=count))
