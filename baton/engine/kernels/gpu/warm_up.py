"""Forwards of every shape class that serving can reach, run before a worker registers.

Triton compiles a kernel for each combination of constants, and for each class of every integer argument (1, multiple of
16, other). That takes seconds, and a worker's lease is about as long. So no serving step may be the first one of its
class. Constants and arguments depend on the number of rows and on the longest context at most by powers of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import structlog
import torch

from baton.clock import SystemClock
from baton.engine.batch import Batch
from baton.engine.kv_cache import KVCache
from baton.engine.model_backend import ModelBackend

Shape = Sequence[tuple[int, int]]  # new tokens and context of each sequence
log = structlog.get_logger()


def batch_of(shape: Shape, wanted: int, table_width: int, block_size: int, device: torch.device) -> Batch:
    """Return a batch of zeros with this shape and `wanted` rows of logits, as `Inputs` builds it. All KV goes to block
    0. The block tables are a part of int32 [len(shape), table_width].
    """
    counts, contexts = [count for count, _ in shape], [context for _, context in shape]
    with device:
        positions = torch.cat([torch.arange(context - count, context) for count, context in shape])
        return Batch(
            token_ids=torch.zeros(len(positions), dtype=torch.int64),
            positions=positions,
            slot_mapping=positions % block_size,
            query_lens=counts,
            context_lens=contexts,
            query_starts=torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32),
            kv_lens=torch.tensor(contexts, dtype=torch.int32),
            block_tables=torch.zeros(len(shape), table_width, dtype=torch.int32)[:, : -(-max(contexts) // block_size)],
            logit_rows=torch.arange(wanted),
            on_layer=lambda layer: None,  # forces a normal forward where there are graphs
        )


def shapes(max_tokens: int, max_rows: int, max_model_len: int) -> Iterator[Shape]:
    """Yield decode steps, prompt chunks at the begin and the end of a context, and steps that mix both."""
    contexts = _powers(max_model_len)
    for rows in _powers(min(max_rows, max_tokens)):
        yield from ([(1, context)] * rows for context in contexts)
    for chunk in _powers(min(max_tokens, max_model_len))[1:]:
        yield [(chunk, chunk)]
        yield [(chunk, max_model_len)]
        if chunk < max_tokens and max_rows > 1:
            yield from ([(chunk, chunk), (1, context)] for context in contexts)


def warm_forwards(backend: ModelBackend, kv: KVCache, max_tokens: int, max_rows: int, max_model_len: int) -> None:
    """Run one forward of each shape over block 0 of an unused `kv`. Raises an error of the device."""
    clock = SystemClock()
    began, size, table_width = clock.monotonic(), backend.layout.block_size, backend.layout.blocks_for(max_model_len)
    every = list(shapes(max_tokens, max_rows, max_model_len))
    for shape in every:
        backend.forward(batch_of(shape, len(shape), table_width, size, backend.device), kv)
    if backend.device.type == "cuda":
        torch.cuda.synchronize(backend.device)
    log.info("kernels_warmed", forwards=len(every), seconds=round(clock.monotonic() - began, 3))


def _powers(limit: int) -> list[int]:
    """Return the powers of two below `limit`, and `limit`."""
    return [1 << bits for bits in range((limit - 1).bit_length())] + [limit]


def claim_activations(backend: ModelBackend, max_batched_tokens: int, max_running: int) -> None:
    """Run the widest forward once on a GPU, so that scratch and the allocator hold their memory from then on. A later
    `auto_kv_bytes` then sees the memory that is free for KV. Raises torch.OutOfMemoryError if it does not fit.
    """
    if backend.device.type != "cuda":
        return
    longest, block_size = backend.max_model_len, backend.layout.block_size
    batch = widest_batch(max_batched_tokens, max_running, longest, block_size, backend.device)
    backend.forward(batch, backend.make_cache(1))
    torch.cuda.synchronize(backend.device)


def widest_batch(tokens: int, running: int, max_model_len: int, block_size: int, device: torch.device) -> Batch:
    """Return prompts of `tokens` tokens in total, with `running` rows of logits. All KV goes to block 0."""
    lengths = [min(max_model_len, tokens - start) for start in range(0, tokens, max_model_len)]
    table_width = -(-max(lengths) // block_size)
    return batch_of([(length, length) for length in lengths], min(running, tokens), table_width, block_size, device)
