"""A model with random weights and no files, drawn on the device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from baton.core import KVLayout
from baton.engine.kernels.select import choose_kernels
from baton.engine.kv_cache import DTYPES
from baton.engine.models.checkpoint import Weights
from baton.engine.models.config import parse_config
from baton.engine.models.decoder import Decoder
from baton.engine.models.json_fields import Fields
from baton.engine.models.llama import Parts
from baton.engine.models.loading import TransformerBackend

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from baton.engine.kernels.base import Kernels
    from baton.engine.models.checkpoint import Checkpoint
    from benchmarks.lib.shapes import Shape


class RandomCheckpoint:
    """Stand-in for `Checkpoint` that has any requested tensor. Norms are near 1, and matrices keep variance."""

    folder = Path("random")

    def __init__(self, device: torch.device, seed: int, missing: Collection[str] = ()) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device, self._missing = device, missing

    def __contains__(self, name: str) -> bool:
        return name not in self._missing

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor drawn on the device."""
        noise = torch.randn(shape, generator=self._generator, device=self._device)
        if "norm" in name:
            return noise.mul_(0.1).add_(1)
        return noise.mul_(0.5 if len(shape) == 1 or "embed" in name else shape[1] ** -0.5)

    def scheme(self, names: Collection[str]) -> None:
        """Return None, because no layer is quantised."""
        del names

    def release(self, taken: Tensor) -> None:
        """Do nothing, because nothing is mapped."""


def random_model(
    settings: dict[str, Any],
    *,
    device: torch.device,
    dtype: str,
    block_size: int,
    kernels: Kernels | None = None,
    seed: int = 0,
) -> TransformerBackend:
    """Return a Llama-like model with these config.json settings. By default, the device chooses the kernels."""
    config = parse_config(Fields("random", settings))
    missing = ("lm_head.weight",) if config.tied else ()
    checkpoint = cast("Checkpoint", RandomCheckpoint(device, seed, missing))
    chosen = kernels or choose_kernels(device, DTYPES[dtype])
    parts = Parts(Weights(checkpoint, DTYPES[dtype], device), chosen)
    model = Decoder(config, parts)
    return TransformerBackend(
        name="random",
        layout=KVLayout(config.layers, config.kv_heads, config.head_dim, block_size, dtype),
        vocab_size=config.vocab_size,
        max_model_len=config.max_positions,
        device=device,
        fingerprint="random",
        model=model,
    )


def settings_of(shape: Shape, max_positions: int) -> dict[str, Any]:
    """Return the config.json of a shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": shape.tied,
    }
