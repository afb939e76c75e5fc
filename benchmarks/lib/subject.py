"""Baton as a measured process: the engine with scheduler, sampler and detokenizer, as in a worker."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

import baton
from baton.core import HandoffId, Sampling, SequenceSpec
from baton.engine.engine import Engine
from baton.engine.kernels.cpu.compiler import level_here
from baton.engine.kernels.quantized import Quantize
from baton.engine.models.loading import load_model
from baton.tokenizer import load_tokenizer
from benchmarks.lib.protocol import clock, serve
from benchmarks.lib.shapes import stored

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.engine.kernels.kv_levels import KVDtype
    from baton.engine.model_backend import ModelBackend
    from benchmarks.lib.protocol import Answer, Handler, Setup

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
QUANTIZED: dict[str, Quantize] = {"int8": "int8", "int4": "int4"}
MAX_BATCHED_TOKENS = 2048
WARM_STEPS = 2
FOREVER = 1 << 20  # more tokens than any measurement takes


class TimedBackend:
    """A backend that sums the time of its forwards."""

    def __init__(self, backend: ModelBackend) -> None:
        self._backend = backend
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(self, *args: Any) -> torch.Tensor:
        """Run and time the backend's forward."""
        began = clock()
        try:
            return self._backend.forward(*args)
        finally:
            self.seconds += clock() - began


class Subject:
    """The engine and the two measurements. Prompts never repeat, so caches cannot help."""

    def __init__(self, setup: Setup, quantize: Quantize = "none", kv_dtype: KVDtype = "auto") -> None:
        loaded = load_model(setup.model, dtype=DTYPES[stored(setup.dtype)], quantize=quantize, kv_dtype=kv_dtype)
        self._backend = TimedBackend(loaded)
        blocks = self._backend.layout.blocks_for(setup.kv_tokens)
        self._engine = Engine(
            cast("ModelBackend", self._backend),
            load_tokenizer(Path(setup.model)),
            total_blocks=blocks,
            max_batched_tokens=MAX_BATCHED_TOKENS,
        )
        self._random = random.Random(0)
        self._requests = 0

    def prefill(self, tokens: int, repeats: int) -> Answer:
        """Return seconds from submitting a prompt to its first token."""
        return {"seconds": [self._first_token(tokens) for _ in range(repeats)]}

    def decode(self, batch: int, context: int, steps: int) -> Answer:
        """Return seconds of each step while all `batch` sequences decode, and of the model's forward in each."""
        keys = {self._submit(self._prompt(context), FOREVER) for _ in range(batch)}
        waiting = set(keys)
        while waiting:
            waiting -= self._step()
        for _ in range(WARM_STEPS):
            self._step()
        timed = [self._timed_step() for _ in range(steps)]
        for key in keys:
            self._engine.release(key)
        return {"seconds": [step for step, _ in timed], "forward": [forward for _, forward in timed]}

    def _first_token(self, tokens: int) -> float:
        prompt = self._prompt(tokens)
        began = clock()
        key = self._submit(prompt, 1)
        while key not in self._step():
            pass
        return clock() - began

    def _timed_step(self) -> tuple[float, float]:
        self._backend.seconds, began = 0.0, clock()
        self._step()
        return clock() - began, self._backend.seconds

    def _step(self) -> set[HandoffId]:
        result = self._engine.step()
        if result.failed or result.preempted or result.idle:
            raise RuntimeError(f"the engine cannot go on: {result}")
        return {output.key for output in result.outputs}

    def _prompt(self, tokens: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(3, self._backend.vocab_size) for _ in range(tokens))

    def _submit(self, prompt: tuple[int, ...], max_tokens: int) -> HandoffId:
        self._requests += 1
        key = HandoffId(f"bench-{self._requests}", 0)
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True)
        self._engine.submit(key, SequenceSpec(prompt, sampling))
        return key


def load(setup: Setup) -> tuple[Answer, Mapping[str, Handler]]:
    """Return the version and the handlers for `serve`."""
    torch.set_num_threads(setup.threads)
    began = clock()
    subject = Subject(setup, quantize=QUANTIZED.get(setup.dtype, "none"))
    loading = clock() - began
    level = level_here() if setup.level != "none" else "none"
    version = f"{baton.__version__} (torch {torch.__version__})"
    return {"version": version, "level": level, "isa": f"level {level}", "load_s": round(loading, 1)}, {
        "prefill": subject.prefill,
        "decode": subject.decode,
    }


if __name__ == "__main__":
    serve(load)
