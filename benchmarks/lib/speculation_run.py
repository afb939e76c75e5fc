"""Engines with and without speculation on one model, and their rates in turns."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from baton.core import HandoffId, Sampling, SequenceSpec
from baton.engine.engine import Engine
from baton.engine.speculation.checks import equal_rows
from baton.engine.speculation.forwards import SpeculationOptions
from baton.engine.speculation.suffix_index import NgramProposer
from benchmarks.lib.protocol import clock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from baton.engine.model_backend import ModelBackend
    from baton.tokenizer import Tokenizer

CERTAIN = 1e4  # added to a logit, far more than any noise
BLOCKS, MAX_RUNNING, MAX_BATCHED_TOKENS = 2048, 32, 2048


class Scripted:
    """A backend with the cost of its model, whose draws are those of a written answer, for one sequence at a time."""

    def __init__(self, backend: ModelBackend) -> None:
        self._backend = backend
        self.script: list[int] = []  # token by position, prompt included; empty leaves the logits alone

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(self, *args: Any) -> Tensor:
        """Run the model and raise the logit of the token that is written next."""
        logits = self._backend.forward(*args)
        for row, position in enumerate(args[0].positions[args[0].logit_rows].tolist() if self.script else ()):
            if position + 1 < len(self.script):
                logits[row, self.script[position + 1]] += CERTAIN
        return logits


@dataclass
class Rates:
    """Tokens per second while sequences decode, by kind of engine, one entry per turn."""

    plain: list[float] = field(default_factory=list)
    speculating: list[float] = field(default_factory=list)

    def ratios(self) -> list[float]:
        return [ours / plain for ours, plain in zip(self.speculating, self.plain, strict=True)]


class Pair:
    """The two engines. Only one works at a time."""

    def __init__(self, backend: ModelBackend, tokenizer: Tokenizer) -> None:
        self.backend, self.tokenizer = Scripted(backend), tokenizer
        found = equal_rows(backend, MAX_BATCHED_TOKENS)
        if found is None:
            raise RuntimeError("the rows of a larger step round differently here")
        self.rows = found
        self.plain = self.engine(None)
        self.speculating = self.engine(SpeculationOptions(NgramProposer(), found.rows, found.fixed))
        self._requests = 0

    def engine(self, speculation: SpeculationOptions | None, **options: Any) -> Engine:
        """Return another engine on the same model."""
        sizes = {"total_blocks": BLOCKS, "max_running": MAX_RUNNING, "max_batched_tokens": MAX_BATCHED_TOKENS}
        backend = cast("ModelBackend", self.backend)
        return Engine(backend, self.tokenizer, speculation=speculation, prefix_cache=False, **{**sizes, **options})

    def turn(self, specs: Sequence[SequenceSpec], rates: Rates, *, reverse: bool) -> None:
        """Measure both engines, one after the other."""
        for speculates in (True, False) if reverse else (False, True):
            engine = self.speculating if speculates else self.plain
            rate = self._rate(engine, specs)
            (rates.speculating if speculates else rates.plain).append(rate)

    def _rate(self, engine: Engine, specs: Sequence[SequenceSpec]) -> float:
        """Return tokens per second from the first token of the last sequence to the first end."""
        keys = [self._submit(engine, spec) for spec in specs]
        waiting, tokens, began = set(keys), 0, 0.0
        while True:
            outputs = engine.step().outputs
            if not waiting:
                tokens += sum(len(output.tokens) for output in outputs)
            waiting -= {output.key for output in outputs}
            if not waiting and not began:
                began = clock()
            if any(output.finish for output in outputs):
                seconds = clock() - began
                break
        for key in keys:
            engine.release(key)
        return tokens / seconds

    def _submit(self, engine: Engine, spec: SequenceSpec) -> HandoffId:
        self._requests += 1
        engine.submit(key := HandoffId(f"bench-{self._requests}", 0), spec)
        return key

    def scripted(self, prompt: str, answer: str, seed: int) -> SequenceSpec:
        """Return the request of a task, and set the script of the backend."""
        asked, said = tuple(self.tokenizer.encode(prompt)), self.tokenizer.encode(answer)
        self.backend.script = [*asked, *said]
        return SequenceSpec(asked, Sampling(max_tokens=len(said), temperature=0.7, seed=seed, ignore_eos=True))

    def randoms(self, batch: int, length: int, tokens: int, seed: int) -> list[SequenceSpec]:
        """Return requests with random prompts, whose answers a model with random weights draws."""
        self.backend.script, rng = [], random.Random(seed)
        prompts = [tuple(rng.randrange(3, self.backend.vocab_size) for _ in range(length)) for _ in range(batch)]
        sampling = Sampling(max_tokens=tokens, temperature=1.0, seed=seed, ignore_eos=True)
        return [SequenceSpec(prompt, sampling) for prompt in prompts]
