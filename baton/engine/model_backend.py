"""Interface between the engine and a model, which the transformer and the oracle implement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from baton.core import KVLayout
from baton.engine.batch import Batch
from baton.engine.kv_cache import KVCache
from baton.engine.models.thinking import Thinker


class ModelBackend(Protocol):
    """A model that keeps its state in paged KV and nowhere else. Used by one thread at a time."""

    name: str  # for people
    layout: KVLayout  # of the cache that `forward` takes
    vocab_size: int  # width of the logits
    max_model_len: int  # limit of a sequence, prompt and output together
    device: torch.device  # of the cache and of a batch's tensors
    fingerprint: str  # of weights, dtype and layout; workers with equal ones can use each other's KV
    nondeterminism: str  # known reason why bits of its fixed forwards vary, or ""
    thinker: Thinker | None  # set if the model thinks about its prompts

    def facts(self, rows: Sequence[int]) -> tuple[str, ...]:
        """Return what else the bits of fixed forwards depend on: the kernels for `rows`, and the number of ranks."""

    def steady_rows(self) -> int:
        """Return up to how many rows the kernels give a row the same bits in every fixed shape (tested at startup). It
        is `kernels.base.ANY_ROWS` if the number of rows never matters.
        """

    def make_cache(self, total_blocks: int, *, exposed: bool = False) -> KVCache:
        """Create the cache that `forward` takes, with finite values. The previous one must not be used again. Processes
        of this host can read it if it is `exposed`, which raises ConfigError if the system or the device cannot.
        """

    def forward(self, batch: Batch, kv: KVCache) -> torch.Tensor:
        """Write the batch's K and V through `slot_mapping`, then return logits, float32 [L, vocab_size]."""

    def check(self) -> None:
        """Raise RankLost or an error of `is_device_lost` if nothing can be computed any more. Called between steps."""

    def close(self) -> None:
        """Stop everything else that computes for the model, if anything does. This is the last call."""


_DEVICE_ERRORS = "CUDA error", "CUDA driver error", "Triton Error [CUDA]", "CUBLAS_STATUS_", "cuDNN error"
_OUT_OF_MEMORY = "out of memory", "ALLOC_FAILED"


def is_device_lost(error: BaseException) -> bool:
    """Return whether a GPU failed with an error other than out of memory. Such errors usually stay: every later call in
    this process fails too. So the worker must end. torch, Triton and cuBLAS raise RuntimeError or a subclass.
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or any(mark in text for mark in _OUT_OF_MEMORY):
        return False
    named = isinstance(error, RuntimeError) and any(mark in text for mark in _DEVICE_ERRORS)
    return named or isinstance(error, torch.AcceleratorError)
