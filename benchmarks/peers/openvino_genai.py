"""openvino-genai as a measured process: its continuous batching on the CPU, step by step.

The first call exports the model with optimum-intel, in a separate process because that takes much memory.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.lib.isa import openvino_isa, restrict_openvino
from benchmarks.lib.protocol import clock, serve
from benchmarks.lib.shapes import ITEMSIZE, MAX_POSITIONS, read_shape, stored

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.lib.protocol import Answer, Handler, Setup

PRECISION = {"bf16": "bf16", "fp32": "f32"}
F32 = "f32"
MAX_BATCHED_TOKENS = 4096
WARM_STEPS = 2
GIB = 1 << 30


class OpenVino:
    """One pipeline without prefix cache; KV in the precision of the model."""

    def __init__(self, setup: Setup) -> None:
        import openvino_genai

        self._genai: Any = openvino_genai
        self.version = openvino_genai.__version__
        shape = read_shape(Path(setup.model))
        self._vocab = shape.vocab
        scheduler = openvino_genai.SchedulerConfig()
        precision = precision_of(setup.dtype)
        itemsize = ITEMSIZE["fp32" if precision == F32 else "bf16"]
        scheduler.cache_size = shape.kv_bytes(setup.kv_tokens, itemsize) // GIB + 1
        scheduler.max_num_batched_tokens = MAX_BATCHED_TOKENS
        scheduler.max_num_seqs = 64
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_NUM_THREADS": setup.threads,
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "PERFORMANCE_HINT": "LATENCY",
        }
        folder = _exported(Path(setup.model), Path(setup.cache), setup.dtype)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties, {})
        self._requests = 0

    def prefill(self, tokens: int, repeats: int) -> Answer:
        """Return seconds from adding a prompt to its first token."""
        return {"seconds": [self._first_token(tokens) for _ in range(repeats)]}

    def decode(self, batch: int, context: int, steps: int) -> Answer:
        """Return seconds of each step while all `batch` sequences decode."""
        handles = [self._add(self._prompt(context), MAX_POSITIONS - context) for _ in range(batch)]
        waiting = handles
        while waiting:
            self._pipeline.step()
            waiting = [handle for handle in waiting if not handle.can_read()]
        seconds = [self._timed_step() for _ in range(WARM_STEPS + steps)][WARM_STEPS:]
        for handle in handles:
            handle.cancel()
        self._drain()
        return {"seconds": seconds}

    def _first_token(self, tokens: int) -> float:
        prompt = self._prompt(tokens)
        began = clock()
        handle = self._add(prompt, 1)  # a request without a handle is dropped
        self._drain()
        seconds = clock() - began
        if not handle.can_read():
            raise RuntimeError("no first token")
        return seconds

    def _timed_step(self) -> float:
        began = clock()
        self._pipeline.step()
        return clock() - began

    def _drain(self) -> None:
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()

    def _prompt(self, tokens: int) -> Any:
        import openvino

        ids = [random.randrange(3, self._vocab) for _ in range(tokens)]
        return openvino.Tensor(np.array([ids], dtype=np.int64))

    def _add(self, prompt: Any, new: int) -> Any:
        self._requests += 1
        config = self._genai.GenerationConfig()
        config.max_new_tokens = new
        config.ignore_eos = True
        config.do_sample = False
        return self._pipeline.add_request(self._requests, prompt, config)


def precision_of(dtype: str) -> str:
    """Return the precision of activations and KV: float32 where OpenVINO cannot compute in bfloat16."""
    import openvino

    wanted = PRECISION[stored(dtype)]
    able = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return wanted if able else F32


def _exported(model: Path, cache: Path, dtype: str) -> Path:
    folder = cache / "openvino" / f"{model.name}{'' if dtype == stored(dtype) else f'-{dtype}'}"
    if not folder.is_dir():
        unfinished = folder.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        program = [sys.executable, "-P", "-m", "benchmarks.peers.openvino_export"]
        subprocess.run([*program, str(model), str(unfinished), dtype], check=True)
        unfinished.rename(folder)
    return folder


def load(setup: Setup) -> tuple[Answer, Mapping[str, Handler]]:
    """Return the version and the handlers for `serve`."""
    restrict_openvino(Path(setup.cache))
    peer = OpenVino(setup)
    about = {"version": peer.version, "isa": openvino_isa(precision_of(setup.dtype))}
    return about, {"prefill": peer.prefill, "decode": peer.decode}


if __name__ == "__main__":
    serve(load)
