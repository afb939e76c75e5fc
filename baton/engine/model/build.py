"""From a model folder to a backend that the engine can run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from baton.core import KVLayout
from baton.engine.kernels.choose import choose_kernels
from baton.engine.kv import DTYPES
from baton.engine.model.config import chosen_dtype, read_config
from baton.engine.model.layers import Parts
from baton.engine.model.llama import Llama
from baton.engine.model.loader import Checkpoint
from baton.engine.model.weights import Weights
from baton.errors import CheckpointError, ConfigError
from baton.hashing import fingerprint

if TYPE_CHECKING:
    from baton.engine.batch import Batch
    from baton.engine.kv import KVCache
    from baton.engine.model.config import ModelConfig
    from baton.engine.model.loader import Progress

DTYPE_CHOICES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, slots=True, eq=False)
class TransformerBackend:
    """A loaded model; implements `baton.engine.backend.ModelBackend`."""

    name: str
    layout: KVLayout
    vocab_size: int
    max_model_len: int
    device: torch.device
    fingerprint: str
    model: Llama

    def forward(self, batch: Batch, kv: KVCache) -> torch.Tensor:
        """Write the batch's K and V, then return logits, float32 [L, vocab_size]."""
        return self.model.forward(batch, kv)


def load_model(
    path: Path | str,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    block_size: int = 16,
    max_model_len: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> TransformerBackend:
    """Load a Hugging Face checkpoint.

    `dtype` is auto, float32 or bfloat16; auto is the checkpoint's own, and float32 for float16 checkpoints.
    `max_model_len` None takes max_position_embeddings. `seed` is for backends that draw their weights: a checkpoint
    has nothing random. `progress` is told how far the weights are. Raises CheckpointError for a folder that cannot be
    served, naming the file, key or tensor, and ConfigError for a `dtype` or `max_model_len` that does not fit.
    """
    del seed
    if dtype not in DTYPE_CHOICES:
        raise ConfigError(f"model.dtype must be one of {', '.join(DTYPE_CHOICES)}, got {dtype!r}")
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    config = read_config(folder)
    length = _max_model_len(config, max_model_len)
    checkpoint = Checkpoint(folder, progress)
    dtype = chosen_dtype(config, dtype, checkpoint.stored_dtype("model.embed_tokens.weight"))
    device = torch.device(device)
    parts = Parts(Weights(checkpoint, DTYPES[dtype], device), choose_kernels(device, DTYPES[dtype]))
    model = Llama(config, parts)
    layout = KVLayout(config.layers, config.kv_heads, config.head_dim, block_size, dtype)
    return TransformerBackend(
        name=folder.resolve().name,
        layout=layout,
        vocab_size=config.vocab_size,
        max_model_len=length,
        device=device,
        fingerprint=fingerprint((checkpoint.finish(), dtype, repr(layout), repr(config))),
        model=model,
    )


def _max_model_len(config: ModelConfig, wanted: int | None) -> int:
    if wanted is None:
        return config.max_positions
    if 1 <= wanted <= config.rope.limit:
        return wanted
    why = f"between 1 and {config.rope.limit}, for which this model's positions are right"
    if config.rope.kind == "dynamic":
        why += " (dynamic RoPE scaling is served up to its original length: beyond it, cached keys would change)"
    raise ConfigError(f"model.max_model_len must be {why}; got {wanted}")
