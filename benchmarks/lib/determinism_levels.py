"""Deterministic requests at levels of instructions: streams of the demo model that are equal between levels."""

from __future__ import annotations

import json
import os
from itertools import combinations
from typing import TYPE_CHECKING

from baton.core import HandoffId, Sampling, SequenceSpec
from baton.engine.determinism.checks import checked_shapes
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.engine import Engine
from baton.engine.kernels.cpu.compiler import LEVEL_VARIABLE, LEVELS, Unavailable, chosen_level
from baton.engine.models.loading import load_model
from baton.tokenizer import load_tokenizer
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.report import markdown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from baton.engine.kernels.quantized import Quantize
    from baton.engine.model_backend import ModelBackend

    Stream = tuple[tuple[int, ...], tuple[float, ...]]  # tokens, and their log-probabilities

MODEL, PROMPTS = ROOT / "models/demo", ROOT / "models/heldout.jsonl"
WEIGHTS: tuple[tuple[str, Quantize], ...] = (
    ("bfloat16", "none"),
    ("float32", "none"),
    ("bfloat16", "int8"),
    ("float32", "int8"),
)
TOKENS = 48  # of an answer, at most


def here(asked: Sequence[str]) -> list[str]:
    """Return the levels that this machine can run, of those asked for, lowest first."""
    return [level for level in reversed(LEVELS) if level in asked and _runs(level)]


def backends(
    folder: Path, levels: Sequence[str], weights: Sequence[tuple[str, Quantize]], splits: str, shapes: FixedShapes
) -> Iterator[tuple[str, str, Quantize, ModelBackend, FixedShapes]]:
    """Yield level, dtype, weights, model and checked shapes. Sets the level of this process."""
    for dtype, quantize in weights:
        for level in levels:
            os.environ[LEVEL_VARIABLE] = level
            backend = load_model(
                folder, dtype=dtype, quantize=quantize, attention_splits="load" if splits == "load" else "load_bf16"
            )
            checked = checked_shapes(backend, shapes)
            if checked is None:
                raise SystemExit(f"deterministic requests are not possible at {level}: {backend.nondeterminism}")
            yield level, dtype, quantize, backend, checked


def agreement(levels: Sequence[str], count: int) -> tuple[str, dict[str, float]]:
    """Answer `count` prompts at each level. Return a table of equal answers by pair of levels, and shares."""
    lines = PROMPTS.read_text().splitlines()[:count]
    prompts = [str(json.loads(line)["prompt"]) for line in lines]
    streams: dict[tuple[str, str], dict[str, list[Stream]]] = {}
    shapes = FixedShapes(exact_rows=64)
    for level, dtype, quantize, backend, checked in backends(MODEL, levels, WEIGHTS, "load", shapes):
        streams.setdefault((dtype, quantize), {})[level] = _answers(backend, checked, prompts)
    rows, shares = list[list[str]](), dict[str, float]()
    for (dtype, rounded), by_level in streams.items():
        name = dtype if rounded == "none" else f"{dtype}, {rounded} weights"
        cells = [_equal(by_level[a], by_level[b]) for a, b in combinations(levels, 2)]
        rows.append([name, *(f"{tokens} ({bits})" for tokens, bits in cells)])
        for pair, (tokens, _) in zip(combinations(levels, 2), cells, strict=True):
            shares[f"{name}: {' = '.join(pair)}"] = round(tokens / len(prompts), 4)
    header = [f"equal of {len(prompts)}", *(" = ".join(pair) for pair in combinations(levels, 2))]
    return markdown(header, rows), shares


def _runs(level: str) -> bool:
    os.environ[LEVEL_VARIABLE] = level
    try:
        return chosen_level() == level
    except Unavailable:
        return False


def _equal(some: Sequence[Stream], others: Sequence[Stream]) -> tuple[int, int]:
    """Return how many streams have equal tokens, and how many have equal bits of log-probabilities too."""
    pairs = list(zip(some, others, strict=True))
    return sum(a[0] == b[0] for a, b in pairs), sum(a == b for a, b in pairs)


def _answers(backend: ModelBackend, shapes: FixedShapes, prompts: Sequence[str]) -> list[Stream]:
    tokenizer = load_tokenizer(MODEL)
    engine = Engine(backend, tokenizer, total_blocks=1024, shapes=shapes, prefix_cache=False)
    sampling = Sampling(max_tokens=TOKENS, temperature=0.0, seed=0, logprobs=0)
    keys = [HandoffId(str(number), 1) for number in range(len(prompts))]
    found: dict[HandoffId, tuple[list[int], list[float]]] = {key: ([], []) for key in keys}
    for key, prompt in zip(keys, prompts, strict=True):
        engine.submit(key, SequenceSpec(tuple(tokenizer.encode(prompt)), sampling, deterministic=True))
    while engine.has_work():
        for output in engine.step().outputs:
            tokens, logprobs = found[output.key]
            tokens += [token.token_id for token in output.tokens]
            logprobs += [token.logprobs.logprob for token in output.tokens if token.logprobs is not None]
    return [(tuple(tokens), tuple(logprobs)) for tokens, logprobs in found.values()]
