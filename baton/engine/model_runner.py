"""Ordinary forwards: input tensors, the model's run, and the draws from its logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from baton.engine.batch import Batch, Injection, StateRows
from baton.engine.determinism.planner import Part
from baton.engine.kernels.select import fused_draw
from baton.engine.kv_cache import KVCache
from baton.engine.memory.staging import BlockTables, Staged
from baton.engine.model_backend import ModelBackend
from baton.engine.request import Request
from baton.engine.sampling.prompt_logprobs import ROWS
from baton.engine.sampling.sampler import Sampled, Sampler
from baton.engine.sequence import LayerListener, ScheduledSequence
from baton.engine.states import States
from baton.engine.thinking import Thoughts


class Inputs:
    """Builder of one engine's batches: at most `max_tokens` tokens of `max_rows` sequences of `max_blocks` blocks. All
    batches are in the same memory of the device. Behind a step of one token per sequence is padding for CUDA graphs.
    """

    def __init__(
        self, backend: ModelBackend, max_tokens: int, max_rows: int, max_blocks: int, *, staged: bool | None = None
    ) -> None:
        self.device = backend.device
        staged = backend.device.type != "cpu" if staged is None else staged
        self._block_size = backend.layout.block_size
        self._rows = np.arange(max_rows + 1)
        tokens, rows = (torch.int64, (max(max_tokens, max_rows),)), (max_rows,)
        self._staged = Staged(
            backend.device,
            staged=staged,
            token_ids=tokens,
            positions=tokens,
            slots=tokens,
            logit_rows=(torch.int64, (max(max_rows, ROWS),)),
            query_starts=(torch.int32, (max_rows + 1,)),
            kv_lens=(torch.int32, rows),
        )
        self._arrays = self._staged.arrays
        self._tables = BlockTables(max_rows, max_blocks, backend.device, staged=staged)

    def build(
        self,
        work: Sequence[ScheduledSequence],
        tokens: Sequence[list[int]],
        on_layer: Callable[[int], None] | None = None,
        *,
        fixed: bool = False,
        thinking: Injection | None = None,
        every_row: bool = False,
        states: StateRows | None = None,
    ) -> Batch:
        """Build the batch for `work`; `tokens[i]` are all known tokens of sequence i. Valid until the next build."""
        starts = [item.sequence.computed for item in work]
        counts = [item.count for item in work]
        contexts = [start + count for start, count in zip(starts, counts, strict=True)]
        for row, item in enumerate(work):
            assert item.sequence.allocation is not None
            self._tables.write(row, item.sequence.allocation)
        self._arrays["kv_lens"][: len(work)] = contexts
        n = self._write_ones(starts, tokens) if max(counts) == 1 else self._write_chunks(starts, counts, tokens)
        wanted = np.arange(n) if every_row else np.cumsum(counts)[[item.completes for item in work]] - 1
        self._arrays["logit_rows"][: len(wanted)] = wanted
        self._arrays["logit_rows"][len(wanted) :] = 0
        self._tables.push()
        self._staged.push()
        options = {"on_layer": on_layer, "fixed": fixed, "thinking": thinking, "states": states}
        return self._batch(counts, contexts, n, len(wanted), **options)

    def widest(self) -> Batch:
        """Return the memory of steps of one token per sequence as one batch: all rows, with the longest contexts. It
        holds only padding until the next build.
        """
        self._write_ones([], [])
        self._staged.push()
        rows, blocks = self._tables.array.shape
        return self._batch([1] * rows, [blocks * self._block_size] * rows, rows, rows)

    def _batch(self, counts: list[int], contexts: list[int], n: int, wanted: int, **options: Any) -> Batch:
        tensors, width = self._staged.tensors, -(-max(contexts) // self._block_size)
        return Batch(
            token_ids=tensors["token_ids"][:n],
            positions=tensors["positions"][:n],
            slot_mapping=tensors["slots"][:n],
            query_lens=counts,
            context_lens=contexts,
            query_starts=tensors["query_starts"][: len(counts) + 1],
            kv_lens=tensors["kv_lens"][: len(counts)],
            block_tables=self._tables.tensor[: len(counts), :width],
            logit_rows=tensors["logit_rows"][:wanted],
            **options,
        )

    def _write_ones(self, starts: list[int], tokens: Sequence[list[int]]) -> int:
        n, size, arrays = len(starts), self._block_size, self._arrays
        positions = arrays["positions"][:n]
        positions[:] = starts
        # A token that is still on the device (`overlap.py`) is written there.
        pairs = zip(tokens, starts, strict=True)
        arrays["token_ids"][:n] = [known[start] if start < len(known) else 0 for known, start in pairs]
        arrays["slots"][:n] = self._tables.array[self._rows[:n], positions // size] * size + positions % size
        arrays["query_starts"][:] = self._rows
        arrays["slots"][n : len(arrays["kv_lens"])] = -1
        arrays["kv_lens"][n:] = 0
        return n

    def _write_chunks(self, starts: list[int], counts: list[int], tokens: Sequence[list[int]]) -> int:
        size, ends, arrays = self._block_size, np.cumsum(counts), self._arrays
        n, rows = int(ends[-1]), self._rows[: len(counts)].repeat(counts)
        positions = np.arange(n) - (ends - counts - starts)[rows]
        new = [known[start : start + count] for known, start, count in zip(tokens, starts, counts, strict=True)]
        arrays["token_ids"][:n] = list(chain.from_iterable(new))
        arrays["positions"][:n] = positions
        arrays["slots"][:n] = self._tables.array[rows, positions // size].astype(np.int64) * size + positions % size
        arrays["query_starts"][1 : len(counts) + 1] = ends
        return n


class SampledToken(NamedTuple):
    """The next token of a request. It is `final` unless it is a candidate of a deterministic request."""

    request: Request
    sampled: Sampled
    final: bool


class OrdinaryForwards:
    """Ordinary forwards of one engine. `thoughts` is set if the model thinks, `states` if it has recurrent layers."""

    def __init__(self, inputs: Inputs, thoughts: Thoughts | None = None, states: States | None = None) -> None:
        self.inputs, self._thoughts, self._states = inputs, thoughts, states
        self.sampler = Sampler(fused_draw(inputs.device))

    @torch.inference_mode()
    def compute(
        self, part: Part, requests: list[Request], backend: ModelBackend, kv: KVCache, on_layer: LayerListener | None
    ) -> list[SampledToken]:
        """Run the model and draw where all known tokens are computed. A thought may lower the `count` of work."""
        listener = partial(on_layer, part.work) if on_layer is not None else None
        thinking = None if self._thoughts is None else self._thoughts.inject(part.work)
        tokens = [request.tokens for request in requests]
        states = None if self._states is None else self._states.ordinary(part.work, exact=part.exact)
        every, build = part.scores is not None, partial(self.inputs.build, fixed=part.exact, states=states)
        batch = build(part.work, tokens, listener, thinking=thinking, every_row=every)
        logits = backend.forward(batch, kv)
        if part.scores is not None:
            part.scores.take(logits, part.work[0].sequence.computed)
            logits = logits[-1:]
        if self._thoughts is not None and thinking is not None:
            wanted = [item for item in part.work if item.completes]
            self._thoughts.settle(part.work, thinking)
            logits = logits[[item.completes for item in wanted]]
        ready = [request for request, item in zip(requests, part.work, strict=True) if item.completes]
        draws = self.sampler.sample(logits, [request.row for request in ready]) if ready else []
        return [SampledToken(*each, each[0].is_final(exact=part.exact)) for each in zip(ready, draws, strict=True)]
