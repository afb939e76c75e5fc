"""The part of a model that one rank computes: its forwards, its cache, and the graphs of its decode steps.

All ranks make the same calls in the same order, because each forward exchanges parts with those of the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.batch import Batch
from baton.engine.kernels.gpu.cuda_graphs import Captured, CudaCapture, DecodeGraphs
from baton.engine.kv_cache import KVCache
from baton.engine.models.loading import TransformerBackend
from baton.engine.tp.group import Ranks
from baton.engine.tp.kv_memory import KVMemory
from baton.engine.tp.states import mapped_states
from baton.errors import RankLost

REASON_BYTES = 256
Forward = Callable[[], Tensor]


class RankModel:
    """One rank's part, used by one thread. Errors leave the ranks out of step, except where noted."""

    def __init__(self, local: TransformerBackend, ranks: Ranks, memory: KVMemory) -> None:
        self.local, self._ranks, self._memory = local, ranks, memory
        self._cache: KVCache | None = None
        self._graphs: DecodeGraphs | None = None
        self._widest: Batch | None = None
        self._states: Tensor | None = None  # of this rank: float32 [slots, numbers]

    def drop_cache(self) -> None:
        """Forget cache and states, and the graphs over them. On the ranks above 0, that frees their memory."""
        self._cache = self._graphs = self._widest = self._states = None

    def make_cache(self, total_blocks: int) -> KVCache:
        """Return the engine's cache. Raises RankLost."""
        self.drop_cache()
        whole, self._cache = self._memory.make(total_blocks)
        return whole

    def map_states(self, slots: int, process: int, file: int) -> Tensor:
        """Map the memory file of states, an open one of a process. Return it: float32 [slots, numbers of all ranks]."""
        width = self.local.model.config.spec.state_size
        rows = mapped_states(Path(f"/proc/{process}/fd/{file}"), slots, self._ranks.size, width)
        self._states = rows[:, self._ranks.rank]
        self._ranks.gather(b"\0")  # all have mapped it
        return rows.flatten(1)

    def capture(self, widest: Batch) -> list[int]:
        """Capture decode steps over the cache and the memory of `widest`, and return the buckets. Raises RuntimeError
        on all ranks, which can continue without graphs, if one cannot capture. RankLost: they are out of step.
        """
        graphs = DecodeGraphs(self.local, self._own(), widest)
        self._ranks.exchange.fixed = False
        graphs.capture(partial(self._captured, CudaCapture(self.local.device)))
        self._graphs, self._widest = graphs, widest
        return graphs.sizes

    def bucket(self, batch: Batch) -> int:
        """Return the bucket of the graph for this batch, or 0."""
        if self._graphs is None or batch.on_layer is not None:  # a graph cannot call `on_layer`
            return 0
        return self._graphs.bucket(batch, self._own()) or 0

    def forward(self, batch: Batch, bucket: int) -> Tensor:
        """Return the logits on rank 0, float32 [L, vocab]. They are undefined on the other ranks."""
        if bucket:
            assert self._graphs is not None
            assert self._widest is not None
            if batch.token_ids.data_ptr() != self._widest.token_ids.data_ptr():  # as on each rank but rank 0
                fill(self._widest, batch)
            return self._graphs.run(batch, bucket)
        self._ranks.exchange.fixed = batch.fixed
        if batch.states is not None:
            assert self._states is not None
            batch = replace(batch, states=replace(batch.states, memory=self._states))
        return self.local.model.forward(batch, self._own())

    def _own(self) -> KVCache:
        if self._cache is None:
            raise ValueError("no cache was made")
        return self._cache

    def _captured(self, capture: Callable[[Forward], Captured], forward: Forward) -> Captured:
        """Capture, and fail on all ranks if it fails on one. Ranks exchange parts only in the forward before it."""
        found, reason, ran = None, b"", list[Tensor]()

        def noted() -> Tensor:
            ran.append(forward())
            return ran[-1]

        try:
            found = capture(noted)
        except RuntimeError as why:
            if not ran:
                raise RankLost(f"a forward failed: {why}") from why  # the other ranks wait for its parts
            reason = (str(why) or type(why).__name__).encode()[:REASON_BYTES]
        for rank, told in enumerate(self._ranks.gather(reason.ljust(REASON_BYTES, b"\0"))):
            if text := told.rstrip(b"\0").decode(errors="replace"):
                raise RuntimeError(f"rank {rank}: {text}")
        assert found is not None
        return found


def empty(rows: int, blocks: int, block_size: int, device: torch.device) -> Batch:
    """Return memory for decode steps of up to `rows` sequences of `blocks` blocks: a batch of padding."""
    ints = torch.zeros(3, rows, dtype=torch.int64, device=device)
    return Batch(
        token_ids=ints[0],
        positions=ints[1],
        slot_mapping=torch.full((rows,), -1, device=device),
        query_lens=[1] * rows,
        context_lens=[blocks * block_size] * rows,
        query_starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
        kv_lens=torch.zeros(rows, dtype=torch.int32, device=device),
        block_tables=torch.zeros(rows, blocks, dtype=torch.int32, device=device),
        logit_rows=ints[2],
    )


def fill(memory: Batch, batch: Batch) -> None:
    """Copy a batch of one token per sequence into `memory` from `empty`. The rows behind it become padding."""
    rows, width = batch.block_tables.shape
    for own, sent, padding in (
        (memory.token_ids, batch.token_ids, 0),
        (memory.positions, batch.positions, 0),
        (memory.slot_mapping, batch.slot_mapping, -1),
        (memory.kv_lens, batch.kv_lens, 0),
        (memory.logit_rows, batch.logit_rows, 0),
    ):
        own[: len(sent)].copy_(sent)
        own[len(sent) :].fill_(padding)
    memory.block_tables[:rows, :width].copy_(batch.block_tables)
