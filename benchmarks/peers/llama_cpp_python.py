"""llama.cpp as a measured process, through llama-cpp-python's C interface. KV is f16, its default."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np

from benchmarks.lib.protocol import clock, serve
from benchmarks.lib.shapes import read_shape
from benchmarks.peers.gguf_export import exported

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.lib.protocol import Answer, Handler, Setup

SEQUENCES, LONGEST = 32, 2304  # each sequence has its own part of the KV, as large as the longest one needs
WARM_STEPS = 2


class LlamaCpp:
    """One context with capacity for all sequences."""

    def __init__(self, setup: Setup) -> None:
        self._vocab = read_shape(Path(setup.model)).vocab
        self._random = random.Random(0)
        llama_cpp.llama_backend_init()
        path = exported(Path(setup.model), Path(setup.cache), setup.dtype)
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = SEQUENCES * LONGEST, SEQUENCES
        params.n_batch = LONGEST
        params.n_threads = params.n_threads_batch = setup.threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        self._batch = llama_cpp.llama_batch_init(LONGEST, 0, 1)

    def prefill(self, tokens: int, repeats: int) -> Answer:
        """Return seconds for a prompt and its first token."""
        return {"seconds": [self._run([(0, position) for position in range(tokens)]) for _ in range(repeats)]}

    def decode(self, batch: int, context: int, steps: int) -> Answer:
        """Return seconds of each step of `batch` sequences."""
        for sequence in range(batch):
            self._run([(sequence, position) for position in range(context)])
        positions = range(context, context + WARM_STEPS + steps)
        seconds = [self._run([(sequence, position) for sequence in range(batch)]) for position in positions]
        return {"seconds": seconds[WARM_STEPS:]}

    def _run(self, rows: list[tuple[int, int]]) -> float:
        """Return seconds to compute random tokens at (sequence, position), with the last logits of each sequence."""
        if rows[0][1] == 0:
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), rows[0][0], -1, -1)
        ends = {sequence: index for index, (sequence, _) in enumerate(rows)}
        self._fill(rows, set(ends.values()))
        began = clock()
        if llama_cpp.llama_decode(self._context, self._batch) != 0:
            raise RuntimeError("llama_decode failed")
        for index in ends.values():
            self._logits(index).argmax()
        return clock() - began

    def _fill(self, rows: list[tuple[int, int]], wanted: set[int]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (sequence, position) in enumerate(rows):
            batch.token[index] = self._random.randrange(3, self._vocab)
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = index in wanted

    def _logits(self, index: int) -> Any:
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, index), (self._vocab,))


def load(setup: Setup) -> tuple[Answer, Mapping[str, Handler]]:
    """Return the version and the handlers for `serve`."""
    peer = LlamaCpp(setup)
    about = {"version": llama_cpp.__version__, "isa": llama_cpp.llama_print_system_info().decode()}
    return about, {"prefill": peer.prefill, "decode": peer.decode}


if __name__ == "__main__":
    serve(load)
