"""llama.cpp with prompt lookup as a measured process: its forwards, and the proposals of llama-cpp-python."""

from __future__ import annotations

from typing import TYPE_CHECKING

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from benchmarks.lib.protocol import clock, serve
from benchmarks.peers.llama_cpp_python import LlamaCpp

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.lib.protocol import Answer, Handler, Setup


class Lookup(LlamaCpp):
    """One sequence whose draws are those of a written answer."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._propose = LlamaPromptLookupDecoding()  # its defaults: 10 tokens behind a match of 2

    def repeat(self, prompt: list[int], answer: list[int], *, speculates: bool) -> Answer:
        """Return seconds from the first token to the last, and the number of tokens in this time."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), 0, -1, -1)
        self._forward(prompt, 0, 1)
        began, done = clock(), 1
        while done < len(answer):
            known = [*prompt, *answer[:done]]
            proposed = self._proposals(known) if speculates else []
            self._forward([known[-1], *proposed], len(known) - 1, 1 + len(proposed))
            right = 0
            while right < len(proposed) and done + right < len(answer) and proposed[right] == answer[done + right]:
                right += 1
            done = min(done + right + 1, len(answer))
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), 0, len(prompt) + done - 1, -1)
        return {"seconds": clock() - began, "tokens": len(answer) - 1}

    def _proposals(self, known: list[int]) -> list[int]:
        return [int(token) for token in self._propose(np.array(known, dtype=np.intc))]

    def _forward(self, tokens: Sequence[int], position: int, drawn: int) -> None:
        """Compute tokens of the sequence from `position` on, and draw from the logits of the last `drawn` rows."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = index >= len(tokens) - drawn
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        for index in range(len(tokens) - drawn, len(tokens)):
            self._logits(index).argmax()


def load(setup: Setup) -> tuple[Answer, Mapping[str, Handler]]:
    """Return the version and the handler for `serve`."""
    return {"version": llama_cpp.__version__}, {"repeat": Lookup(setup).repeat}


if __name__ == "__main__":
    serve(load)
