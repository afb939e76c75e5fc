"""CUDA graphs for decode steps: a whole forward is one launch, captured once for each bucket of batch sizes.

A step of n sequences replays the graph of the smallest bucket that holds n, over static input tensors that are filled
first. Rows beyond n are padding: they have no KV and slot -1, to which no kernel stores. A graph does not depend on
lists of the host, so its split counts are those of the longest possible context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import structlog
import torch
from torch import Tensor

from baton.clock import SystemClock
from baton.engine.batch import Batch
from baton.engine.kernels.base import Scratch
from baton.engine.kernels.gpu.shapes import WIDEST_HEAD, bucket_for, buckets
from baton.engine.kv_cache import KVCache
from baton.engine.model_backend import ModelBackend
from baton.engine.models.loading import TransformerBackend

log = structlog.get_logger()


class Captured(NamedTuple):
    """A captured forward. A replay reads the static inputs and writes `logits`."""

    replay: Callable[[], None]
    logits: Tensor


class CudaCapture:
    """Captures forwards on one device. All graphs share one memory pool, because no two run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()

    def __call__(self, forward: Callable[[], Tensor]) -> Captured:
        """Capture after one normal run, which compiles kernels and initialises libraries outside the graph. Raises
        RuntimeError if that fails.
        """
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            forward()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local, because transfers may use the device from other threads during the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = forward()
        return Captured(graph.replay, logits)


class Static:
    """The inputs of all graphs, for up to `rows` sequences of `blocks` blocks."""

    def __init__(self, rows: int, blocks: int, block_size: int, device: torch.device) -> None:
        self._longest = blocks * block_size

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token_ids, self.positions, self.logit_rows = zeros(rows), zeros(rows), zeros(rows)
        self.slots, self.kv_lens = zeros(rows) - 1, zeros(rows, dtype=torch.int32)
        self.tables = zeros(rows, blocks, dtype=torch.int32)
        self.starts = torch.arange(rows + 1, dtype=torch.int32, device=device)

    def batch(self, rows: int) -> Batch:
        """Return the batch that the graph of this bucket reads. On the host, all contexts have the maximum length."""
        return Batch(
            token_ids=self.token_ids[:rows],
            positions=self.positions[:rows],
            slot_mapping=self.slots[:rows],
            query_lens=[1] * rows,
            context_lens=[self._longest] * rows,
            query_starts=self.starts[: rows + 1],
            kv_lens=self.kv_lens[:rows],
            block_tables=self.tables[:rows],
            logit_rows=self.logit_rows[:rows],
        )

    def fill(self, batch: Batch, bucket: int) -> None:
        """Copy in a batch of one token per sequence, and pad it to `bucket` rows. Never blocks."""
        rows, wanted = len(batch.token_ids), len(batch.logit_rows)
        self.token_ids[:rows].copy_(batch.token_ids)
        self.positions[:rows].copy_(batch.positions)
        self.slots[:rows].copy_(batch.slot_mapping)
        self.kv_lens[:rows].copy_(batch.kv_lens)
        self.tables[:rows, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        self.logit_rows[:wanted].copy_(batch.logit_rows)
        if rows < bucket:
            self.slots[rows:bucket].fill_(-1)
            self.kv_lens[rows:bucket].fill_(0)
        if wanted < bucket:
            self.logit_rows[wanted:bucket].fill_(0)


class DecodeGraphs:
    """The graphs for decode batches over one cache."""

    def __init__(self, model: TransformerBackend, kv: KVCache, max_rows: int, max_blocks: int) -> None:
        self._model, self._kv = model, kv
        self.sizes = buckets(max_rows)
        self._max_blocks = max_blocks
        self._static = Static(max_rows, max_blocks, model.layout.block_size, model.device)
        self._scratch = Scratch(model.model.scratch.dtype, model.model.scratch.device)  # replays write to its memory
        self._graphs: dict[int, Captured] = {}

    def capture(self, capture: Callable[[Callable[[], Tensor]], Captured]) -> None:
        """Capture all buckets, the largest first, because its scratch is large enough for the others."""
        model = self._model.model
        # A graph writes to the addresses of its capture, but the model's own scratch moves when it grows.
        before, model.scratch = model.scratch, self._scratch
        try:
            for rows in reversed(self.sizes):
                self._graphs[rows] = capture(partial(self._model.forward, self._static.batch(rows), self._kv))
        finally:
            model.scratch = before

    def bucket(self, batch: Batch, kv: KVCache) -> int | None:
        if kv is not self._kv or max(batch.query_lens) > 1 or batch.block_tables.shape[1] > self._max_blocks:
            return None
        if batch.fixed:  # padding to a bucket would change its shape
            return None
        return bucket_for(len(batch.query_lens), self.sizes) if self._graphs else None

    def run(self, batch: Batch, bucket: int) -> Tensor:
        """Return the logits of the batch, float32 [L, vocab], valid until the next run."""
        captured = self._graphs[bucket]
        self._static.fill(batch, bucket)
        captured.replay()
        return captured.logits[: len(batch.logit_rows)]


@dataclass(slots=True, eq=False, kw_only=True)
class GraphedBackend(TransformerBackend):
    """A model with decode steps replayed from graphs."""

    graphs: DecodeGraphs

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        bucket = None if batch.on_layer else self.graphs.bucket(batch, kv)  # a graph cannot call `on_layer`
        return self.model.forward(batch, kv) if bucket is None else self.graphs.run(batch, bucket)


def with_graphs(backend: ModelBackend, kv: KVCache, max_running: int, max_model_len: int) -> ModelBackend:
    """Return the backend with decode steps captured over this cache, or the backend itself if that is impossible. Only
    Llama-like models on the GPU kernels can be captured. A mixture of experts reads its choice from the device. Latent
    attention would store padding. Ranks exchange through the host. Thinking takes states with each batch.
    """
    if not isinstance(backend, TransformerBackend) or backend.device.type != "cuda":
        return backend
    config, kernels = backend.model.config, backend.model.kernels.name
    if config.experts or config.latent or config.thinking or config.head_dim > WIDEST_HEAD or kernels != "triton":
        return backend
    clock = SystemClock()
    began = clock.monotonic()
    graphs = DecodeGraphs(backend, kv, max_running, backend.layout.blocks_for(max_model_len))
    try:
        graphs.capture(CudaCapture(backend.device))
    except RuntimeError as why:
        log.warning("decode_graphs_unavailable", reason=str(why))
        return backend
    log.info("decode_graphs_captured", buckets=graphs.sizes, seconds=round(clock.monotonic() - began, 3))
    return graphed(backend, graphs)


def graphed(backend: TransformerBackend, graphs: DecodeGraphs) -> GraphedBackend:
    """Return a copy of the backend with these graphs."""
    return GraphedBackend(
        name=backend.name,
        layout=backend.layout,
        vocab_size=backend.vocab_size,
        max_model_len=backend.max_model_len,
        device=backend.device,
        fingerprint=backend.fingerprint,
        model=backend.model,
        nondeterminism=backend.nondeterminism,
        graphs=graphs,
    )
