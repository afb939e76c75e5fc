"""One engine under a closed load with a share of deterministic requests, and a fixed-shape alternative."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from baton.core import HandoffId, Sampling, SequenceSpec
from baton.engine.engine import Engine
from baton.engine.step_result import Counters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.engine.batch import Batch
    from baton.engine.determinism.shapes import FixedShapes
    from baton.engine.model_backend import ModelBackend
    from baton.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Load:
    """Queued requests of (prompt, answer) lengths. `running` of them run together, and a `share` is deterministic."""

    lengths: tuple[tuple[int, int], ...]
    running: int
    share: float
    seed: int = 0
    prompts: tuple[tuple[int, ...], ...] = ()  # of a trained model, at least as long as needed; else random tokens


@dataclass(slots=True)
class Took:
    """Seconds of one run, of each request to its first token and end, and between tokens (spread evenly). `cpu_s` is
    time of the processor, which other load on the machine changes less.
    """

    seconds: float
    tokens: int
    cpu_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class FixedDecode:
    """A backend with one shape for all decode steps: `rows` rows, with unused padding."""

    def __init__(self, backend: ModelBackend, rows: int, spare: int) -> None:
        self._backend, self._rows, self._spare = backend, rows, spare

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(self, batch: Batch, kv: Any) -> torch.Tensor:
        """Run the backend. Pads a batch that only decodes to full size."""
        missing = self._rows - len(batch.query_lens)
        if max(batch.query_lens) > 1 or not missing:
            return self._backend.forward(batch, kv)
        none, slot = torch.zeros(missing, dtype=torch.int64), self._spare * self._backend.layout.block_size
        tables = torch.full((missing, batch.block_tables.shape[1]), self._spare, dtype=torch.int32)
        padded = replace(
            batch,
            token_ids=torch.cat([batch.token_ids, none]),
            positions=torch.cat([batch.positions, none]),
            slot_mapping=torch.cat([batch.slot_mapping, none + slot]),
            query_lens=[1] * self._rows,
            context_lens=batch.context_lens + [1] * missing,
            query_starts=torch.arange(self._rows + 1, dtype=torch.int32),
            kv_lens=torch.cat([batch.kv_lens, torch.ones(missing, dtype=torch.int32)]),
            block_tables=torch.cat([batch.block_tables, tables]),
        )
        return self._backend.forward(padded, kv)


def engine_of(
    backend: ModelBackend, tokenizer: Tokenizer, load: Load, shapes: FixedShapes, *, fixed_decode: bool = False
) -> Engine:
    """Return an engine with capacity for all running requests, and no prefix cache."""
    size = backend.layout.block_size
    blocks = load.running * (max(prompt + answer for prompt, answer in load.lengths) // size + 2)
    chosen: Any = FixedDecode(backend, load.running, blocks) if fixed_decode else backend
    return Engine(chosen, tokenizer, total_blocks=blocks, max_running=load.running, prefix_cache=False, shapes=shapes)


def run(engine: Engine, load: Load) -> Took:
    """Run all requests, from the first step to the last end."""
    engine.counters = Counters()
    asked = {HandoffId(f"r{i}", 1): spec for i, spec in enumerate(_specs(load, engine.backend.vocab_size))}
    first, last = dict[HandoffId, float](), dict[HandoffId, float]()
    took, used, began = Took(0.0, 0), time.process_time(), time.perf_counter()
    for key, spec in asked.items():
        engine.submit(key, spec)
    while engine.has_work():
        result = engine.step()
        now = time.perf_counter()
        if result.failed:
            raise RuntimeError(f"the engine cannot go on: {result.failed}")
        for output in result.outputs:
            took.tokens += len(output.tokens)
            if output.key in first:
                took.itl_s += [(now - last[output.key]) / len(output.tokens)] * len(output.tokens)
            first.setdefault(output.key, now)
            last[output.key] = now
    took.seconds, took.counters = time.perf_counter() - began, engine.counters
    took.cpu_s = time.process_time() - used
    took.ttft_s, took.e2e_s = ([at - began for at in times.values()] for times in (first, last))
    if took.tokens != sum(answer for _, answer in load.lengths):
        raise RuntimeError(f"{took.tokens} tokens came")
    return took


def _specs(load: Load, vocab_size: int) -> Sequence[SequenceSpec]:
    rng = random.Random(load.seed)
    marked = {
        int(i * len(load.lengths) / max(1, round(load.share * len(load.lengths))))
        for i in range(round(load.share * len(load.lengths)))
    }
    return [
        SequenceSpec(
            load.prompts[number % len(load.prompts)][-prompt:]
            if load.prompts
            else tuple(rng.randrange(3, vocab_size) for _ in range(prompt)),
            Sampling(max_tokens=answer, temperature=0.0, seed=0, ignore_eos=True),
            deterministic=number in marked,
        )
        for number, (prompt, answer) in enumerate(load.lengths)
    ]
