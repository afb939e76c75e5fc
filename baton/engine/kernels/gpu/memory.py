"""What a GPU needs besides weights and KV, claimed before the rest is counted as free for KV."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from baton.engine.batch import Batch

if TYPE_CHECKING:
    from baton.engine.backend import ModelBackend


def claim_activations(backend: ModelBackend, max_batched_tokens: int, max_running: int) -> None:
    """Run the widest forward once, on a GPU: scratch and the allocator keep its memory from then on.

    So `auto_kv_bytes`, called after it, sees what is free indeed. Raises torch.OutOfMemoryError if not even this fits.
    """
    if backend.device.type != "cuda":
        return
    lengths = backend.max_model_len, backend.layout.block_size
    batch = widest_batch(max_batched_tokens, max_running, *lengths, backend.device)
    backend.forward(batch, backend.make_cache(1))
    torch.cuda.synchronize(backend.device)


def widest_batch(tokens: int, running: int, max_model_len: int, block_size: int, device: torch.device) -> Batch:
    """Prompts of `tokens` tokens in all, logits for `running` rows. All KV goes to block 0: a cache of one will do."""
    lengths = [min(max_model_len, tokens - start) for start in range(0, tokens, max_model_len)]
    with device:
        positions = torch.cat([torch.arange(length) for length in lengths])
        return Batch(
            token_ids=torch.zeros(tokens, dtype=torch.int64),
            positions=positions,
            slot_mapping=positions % block_size,
            query_lens=lengths,
            context_lens=lengths,
            query_starts=torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32),
            kv_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=torch.zeros(len(lengths), -(-max(lengths) // block_size), dtype=torch.int32),
            logit_rows=torch.arange(min(running, tokens)),
        )
