"""transformers with prompt lookup as a measured process: `generate()` with a processor that forces a written answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import transformers

from benchmarks.lib.protocol import clock, serve
from benchmarks.peers.transformers_eager import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from benchmarks.lib.protocol import Answer, Handler, Setup

PROPOSALS = 10  # as in the documentation of `prompt_lookup_num_tokens`


class Written:
    """Raises the logit of the token that is written next. `began` is the time of its first call."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.began = script, 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.began = self.began or clock()
        if input_ids.shape[1] < len(self.script):
            scores[:, self.script[input_ids.shape[1]]] += 1e4
        return scores


class Lookup:
    """The eager model."""

    def __init__(self, setup: Setup) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(setup.model, dtype=DTYPES[setup.dtype]).eval()

    @torch.inference_mode()
    def repeat(self, prompt: list[int], answer: list[int], *, speculates: bool) -> Answer:
        """Return seconds from the first token to the last, and the number of tokens in this time."""
        written = Written([*prompt, *answer])
        options = {"prompt_lookup_num_tokens": PROPOSALS} if speculates else {}
        found = self._model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=len(answer),
            min_new_tokens=len(answer),
            logits_processor=transformers.LogitsProcessorList([written]),
            **options,
        )
        seconds = clock() - written.began
        if found[0].tolist() != written.script:
            raise RuntimeError("another answer than the written one")
        return {"seconds": seconds, "tokens": len(answer) - 1}


def load(setup: Setup) -> tuple[Answer, Mapping[str, Handler]]:
    """Return the version and the handler for `serve`."""
    torch.set_num_threads(setup.threads)
    return {"version": transformers.__version__}, {"repeat": Lookup(setup).repeat}


if __name__ == "__main__":
    serve(load)
