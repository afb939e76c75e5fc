"""transformers as a measured process: the inner loop of `generate()`, on a cache filled with random KV."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import transformers

from benchmarks.lib.isa import torch_isa
from benchmarks.lib.protocol import clock, serve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.lib.protocol import Answer, Handler, Setup

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WARM_STEPS = 2


class Transformers:
    """The eager model with its default attention (SDPA)."""

    def __init__(self, setup: Setup) -> None:
        self._dtype = DTYPES[setup.dtype]
        self._model = transformers.AutoModelForCausalLM.from_pretrained(setup.model, dtype=self._dtype).eval()
        self._config = self._model.config

    @torch.inference_mode()
    def prefill(self, tokens: int, repeats: int) -> Answer:
        """Return seconds for a prompt and its first token."""
        return {"seconds": [self._step(1, tokens, None) for _ in range(repeats)]}

    @torch.inference_mode()
    def decode(self, batch: int, context: int, steps: int) -> Answer:
        """Return seconds of each step of one padded batch."""
        cache = self._filled(batch, context)
        return {"seconds": [self._step(batch, 1, cache) for _ in range(WARM_STEPS + steps)][WARM_STEPS:]}

    def _step(self, batch: int, tokens: int, cache: object) -> float:
        ids = torch.randint(3, self._config.vocab_size, (batch, tokens))
        began = clock()
        output = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        output.logits[:, -1].argmax(-1)
        return clock() - began

    def _filled(self, batch: int, context: int) -> transformers.DynamicCache:
        config = self._config
        cache = transformers.DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            kv = torch.randn(2, batch, config.num_key_value_heads, context, config.head_dim).to(self._dtype)
            cache.update(kv[0], kv[1], layer)
        return cache


def load(setup: Setup) -> tuple[Answer, Mapping[str, Handler]]:
    """Return the version and the handlers for `serve`."""
    torch.set_num_threads(setup.threads)
    peer = Transformers(setup)
    about = {"version": transformers.__version__, "isa": torch_isa()}
    return about, {"prefill": peer.prefill, "decode": peer.decode}


if __name__ == "__main__":
    serve(load)
