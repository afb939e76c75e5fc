"""Ordinary forwards: input tensors, the model's run, and the draws from its logits.

`Inputs` keeps its tensors between steps and writes only changes. On a CPU, the host buffers are the tensors of the
batch. Elsewhere each buffer has a device copy and two stages (pinned for CUDA), used alternately. Copies are
asynchronous, and a stage is rewritten only when its last copy is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from baton.engine.batch import Batch, Injection
from baton.engine.block_pool import Allocation
from baton.engine.determinism.planner import Part
from baton.engine.kernels.select import fused_draw
from baton.engine.kv_cache import KVCache
from baton.engine.model_backend import ModelBackend
from baton.engine.request import Request
from baton.engine.sampling.sampler import Sampled, Sampler
from baton.engine.sequence import LayerListener, ScheduledSequence
from baton.engine.thinking import Thoughts

Array = np.ndarray[Any, np.dtype[Any]]
STAGES = 2


class Mirror:
    """A buffer that is written on the host (`array`) and read on the device (result of `push`)."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, staged: bool) -> None:
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        pinned = device.type == "cuda"
        self.stages = [torch.zeros(shape, dtype=dtype, pin_memory=pinned) for _ in range(STAGES if staged else 0)]
        self.array: Array = np.zeros(shape, self.stages[0].numpy().dtype) if staged else self.device.numpy()

    def push(self, n: int, stage: int) -> torch.Tensor:
        """Return the first `n` rows on the device, valid for all work issued after this call."""
        if self.stages:
            staged = self.stages[stage][:n]
            staged.numpy()[...] = self.array[:n]
            self.device[:n].copy_(staged, non_blocking=True)
        return self.device[:n]


class Inputs:
    """Builder of one engine's batches: at most `max_tokens` tokens of `max_rows` sequences of `max_blocks` blocks."""

    def __init__(
        self, backend: ModelBackend, max_tokens: int, max_rows: int, max_blocks: int, *, staged: bool | None = None
    ) -> None:
        self.device = device = backend.device
        staged = device.type != "cpu" if staged is None else staged
        self._block_size = backend.layout.block_size
        self._allocations: list[Allocation | None] = [None] * max_rows
        self._lengths = [0] * max_rows  # entries of each row of the table
        self._starts_of_ones = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._rows_of_ones = torch.arange(max_rows, device=device)
        self._rows = np.arange(max_rows)

        def mirror(dtype: torch.dtype, *shape: int) -> Mirror:
            return Mirror(shape, dtype, device, staged=staged)

        self._token_ids, self._positions, self._slots = (mirror(torch.int64, max_tokens) for _ in range(3))
        self._logit_rows = mirror(torch.int64, max_rows)
        self._query_starts, self._kv_lens = mirror(torch.int32, max_rows + 1), mirror(torch.int32, max_rows)
        self._tables = mirror(torch.int32, max_rows, max_blocks)
        self._stage = 0
        stages = STAGES if device.type == "cuda" else 0
        self._copied = [torch.cuda.Event() for _ in range(stages)]  # type: ignore[no-untyped-call]

    def build(
        self,
        work: Sequence[ScheduledSequence],
        tokens: Sequence[list[int]],
        on_layer: Callable[[int], None] | None = None,
        *,
        fixed: bool = False,
        thinking: Injection | None = None,
    ) -> Batch:
        """Build the batch for `work`; `tokens[i]` are all known tokens of sequence i. Valid until the next build."""
        self._stage = (self._stage + 1) % STAGES
        if self._copied:
            self._copied[self._stage].synchronize()  # waits only if the engine is far ahead of its device
        starts = [item.sequence.computed for item in work]
        counts = [item.count for item in work]
        contexts = [start + count for start, count in zip(starts, counts, strict=True)]
        tables = self._write_tables(work, -(-max(contexts) // self._block_size))
        self._kv_lens.array[: len(work)] = contexts
        ones = max(counts) == 1
        n = self._write_ones(starts, tokens) if ones else self._write_chunks(starts, counts, tokens)
        batch = Batch(
            token_ids=self._token_ids.push(n, self._stage),
            positions=self._positions.push(n, self._stage),
            slot_mapping=self._slots.push(n, self._stage),
            query_lens=counts,
            context_lens=contexts,
            query_starts=self._starts_of_ones[: n + 1] if ones else self._query_starts.push(len(work) + 1, self._stage),
            kv_lens=self._kv_lens.push(len(work), self._stage),
            block_tables=tables,
            logit_rows=self._wanted_rows(work, counts, ones),
            on_layer=on_layer,
            fixed=fixed,
            thinking=thinking,
        )
        if self._copied:
            self._copied[self._stage].record()
        return batch

    def _write_tables(self, work: Sequence[ScheduledSequence], width: int) -> torch.Tensor:
        changed = False
        for row, item in enumerate(work):
            allocation = item.sequence.allocation
            assert allocation is not None
            if allocation is not self._allocations[row] or len(allocation.blocks) != self._lengths[row]:
                self._write_row(row, allocation)
                changed = True
        tables = self._tables.push(len(work), self._stage) if changed else self._tables.device[: len(work)]
        return tables[:, :width]

    def _write_row(self, row: int, allocation: Allocation) -> None:
        table = self._tables.array[row]
        blocks = allocation.blocks[: len(table)]
        kept = self._lengths[row] if allocation is self._allocations[row] else 0
        table[kept : len(blocks)] = blocks[kept:]
        table[len(blocks) : self._lengths[row]] = 0
        self._allocations[row], self._lengths[row] = allocation, len(allocation.blocks)

    def _write_ones(self, starts: list[int], tokens: Sequence[list[int]]) -> int:
        n, size = len(starts), self._block_size
        positions = self._positions.array[:n]
        positions[:] = starts
        # A token that is still on the device (`overlap.py`) is written there.
        pairs = zip(tokens, starts, strict=True)
        self._token_ids.array[:n] = [known[start] if start < len(known) else 0 for known, start in pairs]
        self._slots.array[:n] = self._tables.array[self._rows[:n], positions // size] * size + positions % size
        return n

    def _write_chunks(self, starts: list[int], counts: list[int], tokens: Sequence[list[int]]) -> int:
        size, ends = self._block_size, np.cumsum(counts)
        n, rows = int(ends[-1]), self._rows[: len(counts)].repeat(counts)
        positions = np.arange(n) - (ends - counts - starts)[rows]
        new = [known[start : start + count] for known, start, count in zip(tokens, starts, counts, strict=True)]
        self._token_ids.array[:n] = list(chain.from_iterable(new))
        self._positions.array[:n] = positions
        self._slots.array[:n] = self._tables.array[rows, positions // size].astype(np.int64) * size + positions % size
        self._query_starts.array[1 : len(counts) + 1] = ends
        return n

    def _wanted_rows(self, work: Sequence[ScheduledSequence], counts: list[int], ones: bool) -> torch.Tensor:
        wanted = [item.completes for item in work]
        if ones and all(wanted):
            return self._rows_of_ones[: len(work)]
        rows = np.cumsum(counts)[wanted] - 1
        self._logit_rows.array[: len(rows)] = rows
        return self._logit_rows.push(len(rows), self._stage)


class SampledToken(NamedTuple):
    """The next token of a request. It is `final` unless it is a candidate of a deterministic request."""

    request: Request
    sampled: Sampled
    final: bool


class OrdinaryForwards:
    """Ordinary forwards of one engine. `thoughts` is set if the model thinks."""

    def __init__(self, inputs: Inputs, thoughts: Thoughts | None = None) -> None:
        self.inputs, self._thoughts = inputs, thoughts
        self.sampler = Sampler(fused_draw(inputs.device))

    @torch.inference_mode()
    def compute(
        self, part: Part, requests: list[Request], backend: ModelBackend, kv: KVCache, on_layer: LayerListener | None
    ) -> list[SampledToken]:
        """Run the model and draw where all known tokens are computed. A thought may lower the `count` of work."""
        listener = partial(on_layer, part.work) if on_layer is not None else None
        thinking = None if self._thoughts is None else self._thoughts.inject(part.work)
        tokens = [request.tokens for request in requests]
        batch = self.inputs.build(part.work, tokens, listener, fixed=part.exact, thinking=thinking)
        logits = backend.forward(batch, kv)
        if self._thoughts is not None and thinking is not None:
            wanted = [item for item in part.work if item.completes]
            self._thoughts.settle(part.work, thinking)
            logits = logits[[item.completes for item in wanted]]
        ready = [request for request, item in zip(requests, part.work, strict=True) if item.completes]
        draws = self.sampler.sample(logits, [request.row for request in ready]) if ready else []
        return [SampledToken(*each, each[0].is_final(exact=part.exact)) for each in zip(ready, draws, strict=True)]
