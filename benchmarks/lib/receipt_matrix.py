"""Which fingerprints agree: the demo model at each level of instructions, with 1 and 2 threads, in each dtype."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import torch

from baton.core import HandoffId, Sampling, SequenceSpec
from baton.engine.determinism.checks import bits_fingerprint, checked_shapes
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.engine import Engine
from baton.engine.kernels.cpu.compiler import LEVEL_VARIABLE
from baton.engine.models.loading import load_model
from baton.receipts.form import opened
from baton.tokenizer import load_tokenizer
from benchmarks.lib.receipt_run import MODEL, PROMPTS
from benchmarks.lib.report import markdown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.engine.kernels.quantized import Quantize
    from baton.engine.model_backend import ModelBackend

WEIGHTS: tuple[tuple[str, Quantize], ...] = (("bfloat16", "none"), ("float32", "none"), ("bfloat16", "int8"))
THREADS = (1, 2)
TOKENS = 48  # of an answer, at most


class Setting(NamedTuple):
    """One kind of worker. `level` none means torch's kernels."""

    level: str
    threads: int
    dtype: str
    quantize: Quantize

    @property
    def weights(self) -> str:
        return self.dtype if self.quantize == "none" else f"{self.dtype}, {self.quantize} weights"


@dataclass(frozen=True)
class Run:
    """A setting with its fingerprint and the token digest of each answer; without a fingerprint, `why` is the reason.

    `repeated` means that the same answers in other company had equal digests.
    """

    setting: Setting
    fingerprint: str
    digests: tuple[str, ...] = ()
    repeated: bool = False
    why: str = ""


def matrix(levels: Sequence[str], count: int) -> tuple[str, dict[str, float]]:
    """Answer `count` prompts with each setting. Return the tables, and the figures."""
    tokenizer = load_tokenizer(MODEL)
    prompts = [tuple(tokenizer.encode(json.loads(line)["prompt"])) for line in PROMPTS.read_text().splitlines()[:count]]
    runs = [
        _run(Setting(level, threads, dtype, quantize), prompts)
        for dtype, quantize in WEIGHTS
        for level in (*levels, "none")
        for threads in THREADS
    ]
    known = [run for run in runs if run.fingerprint]
    figures = {
        "settings": float(len(known)),
        "fingerprints": float(len({run.fingerprint for run in known})),
        "repeated": float(sum(run.repeated for run in known)),
    }
    return f"{_list(runs)}\n\n{_pairs(known, count)}", figures


def _run(setting: Setting, prompts: Sequence[tuple[int, ...]]) -> Run:
    os.environ[LEVEL_VARIABLE] = setting.level
    torch.set_num_threads(setting.threads)
    backend = load_model(MODEL, dtype=setting.dtype, quantize=setting.quantize)
    shapes = checked_shapes(backend, FixedShapes(exact_rows=64))
    if shapes is None:
        return Run(setting, "", why=backend.nondeterminism)
    print(f"{setting.weights}, {setting.level} x {setting.threads}", file=sys.stderr, flush=True)
    first, again = (_digests(backend, shapes, prompts, running) for running in (64, 3))
    return Run(setting, bits_fingerprint(backend, shapes), first, first == again)


def _digests(
    backend: ModelBackend, shapes: FixedShapes, prompts: Sequence[tuple[int, ...]], running: int
) -> tuple[str, ...]:
    """Return the token digest of each answer, as in a receipt, with `running` concurrent requests."""
    tokenizer, sampling = load_tokenizer(MODEL), Sampling(max_tokens=TOKENS, temperature=1.0, seed=0, logprobs=0)
    engine = Engine(backend, tokenizer, total_blocks=1024, shapes=shapes, max_running=running, prefix_cache=False)
    found: dict[HandoffId, tuple[list[int], list[float]]] = {}
    for number, prompt in enumerate(prompts):
        found[key := HandoffId(str(number), 1)] = [], []
        engine.submit(key, SequenceSpec(prompt, sampling, deterministic=True))
    while engine.has_work():
        for output in engine.step().outputs:
            ids, logprobs = found[output.key]
            ids += [token.token_id for token in output.tokens]
            logprobs += [token.logprobs.logprob for token in output.tokens if token.logprobs is not None]
    return tuple(opened(*stream).sha256() for stream in found.values())


def _list(runs: Sequence[Run]) -> str:
    header = ("weights", "level", "threads", "fingerprint", "equal in other company")
    rows = []
    for run in runs:
        weights, level, threads = run.setting.weights, run.setting.level, str(run.setting.threads)
        rows.append([weights, level, threads, run.fingerprint or "-", run.why or ("all" if run.repeated else "no")])
    return markdown(header, rows)


def _pairs(runs: Sequence[Run], count: int) -> str:
    """Return a table for each kind of weights: answers with equal bits by pair of settings."""
    tables = []
    for weights in dict.fromkeys(run.setting.weights for run in runs):
        some = [run for run in runs if run.setting.weights == weights]
        names = [f"{run.setting.level} x {run.setting.threads}" for run in some]
        equal = {(a, b): str(_equal(some[a], some[b])) for a, b in combinations(range(len(some)), 2)}
        rows = [
            [name, *(equal.get((min(a, b), max(a, b)), str(count)) for b in range(len(some)))]
            for a, name in enumerate(names)
        ]
        tables.append(f"**{weights}: answers of {count} with equal bits**\n\n{markdown(['', *names], rows)}")
    return "\n\n".join(tables)


def _equal(some: Run, others: Run) -> int:
    return sum(a == b for a, b in zip(some.digests, others.digests, strict=True))
