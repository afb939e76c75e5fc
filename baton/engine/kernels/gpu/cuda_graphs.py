"""CUDA graphs for decode steps: a whole forward is one launch, captured once for each bucket of batch sizes.

A step of n sequences replays the graph of the smallest bucket that holds n. Graphs read the memory of `Inputs`, which
holds each batch anyway. Rows beyond n are padding: they have no KV and slot -1, to which no kernel stores. A graph
does not depend on lists of the host, so it has room for the splits of the longest possible context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import structlog
import torch
from torch import Tensor

from baton.clock import SystemClock
from baton.engine.batch import Batch
from baton.engine.kernels.base import Scratch
from baton.engine.kernels.gpu.shapes import bucket_for, buckets
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


class DecodeGraphs:
    """The graphs for decode batches over one cache."""

    def __init__(self, model: TransformerBackend, kv: KVCache, widest: Batch) -> None:
        """`widest` is `Inputs.widest`, over the memory that holds the batches of later steps."""
        self._model, self._kv, self._widest = model, kv, widest
        self.sizes = buckets(len(widest.query_lens))
        self._scratch = Scratch(model.model.scratch.dtype, model.model.scratch.device)  # replays write to its memory
        self._graphs: dict[int, Captured] = {}

    def capture(self, capture: Callable[[Callable[[], Tensor]], Captured]) -> None:
        """Capture all buckets, the largest first, because its scratch is large enough for the others."""
        model = self._model.model
        # A graph writes to the addresses of its capture, but the model's own scratch moves when it grows.
        before, model.scratch = model.scratch, self._scratch
        try:
            for rows in reversed(self.sizes):
                self._graphs[rows] = capture(partial(self._model.forward, _first(self._widest, rows), self._kv))
        finally:
            model.scratch = before

    def bucket(self, batch: Batch, kv: KVCache) -> int | None:
        """Return the size of the graph for this batch, or None if it needs a normal forward."""
        here = batch.token_ids.data_ptr() == self._widest.token_ids.data_ptr()
        # Padding to a bucket would change the shape of a fixed batch.
        if not here or kv is not self._kv or max(batch.query_lens) > 1 or batch.fixed:
            return None
        return bucket_for(len(batch.query_lens), self.sizes) if self._graphs else None

    def run(self, batch: Batch, bucket: int) -> Tensor:
        """Return the logits of the batch, float32 [L, vocab], valid until the next run. One launch, without copies."""
        captured = self._graphs[bucket]
        captured.replay()
        return captured.logits[: len(batch.logit_rows)]


def _first(widest: Batch, rows: int) -> Batch:
    """Return the batch that the graph of this bucket reads. On the host, all contexts have the maximum length."""
    return Batch(
        token_ids=widest.token_ids[:rows],
        positions=widest.positions[:rows],
        slot_mapping=widest.slot_mapping[:rows],
        query_lens=widest.query_lens[:rows],
        context_lens=widest.context_lens[:rows],
        query_starts=widest.query_starts[: rows + 1],
        kv_lens=widest.kv_lens[:rows],
        block_tables=widest.block_tables[:rows],
        logit_rows=widest.logit_rows[:rows],
    )


@dataclass(slots=True, eq=False, kw_only=True)
class GraphedBackend(TransformerBackend):
    """A model with decode steps replayed from graphs."""

    graphs: DecodeGraphs

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        bucket = None if batch.on_layer else self.graphs.bucket(batch, kv)  # a graph cannot call `on_layer`
        return self.model.forward(batch, kv) if bucket is None else self.graphs.run(batch, bucket)


@runtime_checkable
class Divided(Protocol):
    """A backend whose ranks capture their parts themselves (`baton.engine.tp.backend.ShardedBackend`)."""

    local: TransformerBackend

    def capture(self, widest: Batch) -> list[int]:
        """Capture all buckets on all ranks, and return them. Raises RuntimeError if that is impossible."""


def with_graphs(backend: ModelBackend, kv: KVCache, widest: Batch) -> ModelBackend:
    """Return the backend with decode steps captured over this cache, or the backend itself if that is impossible. Only
    Llama-like models on the GPU kernels can be captured. A mixture of experts was not tested with graphs. Latent
    attention would store padding. Thinking takes states with each batch. Tensor-parallel ranks capture their parts.
    """
    local = backend.local if isinstance(backend, Divided) else backend
    if not isinstance(local, TransformerBackend) or local.device.type != "cuda":
        return backend
    config, kernels = local.model.config, local.model.kernels.name
    if config.experts or config.latent or config.thinking or kernels != "triton":
        return backend
    clock = SystemClock()
    began = clock.monotonic()
    try:
        if isinstance(backend, Divided):
            made: ModelBackend = backend
            sizes = backend.capture(widest)
        else:
            graphs = DecodeGraphs(local, kv, widest)
            graphs.capture(CudaCapture(backend.device))
            made, sizes = graphed(local, graphs), graphs.sizes
    except RuntimeError as why:
        log.warning("decode_graphs_unavailable", reason=str(why))
        return backend
    log.info("decode_graphs_captured", buckets=sizes, seconds=round(clock.monotonic() - began, 3))
    return made


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
