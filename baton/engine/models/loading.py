"""Loading of a model folder into a backend for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import structlog
import torch

from baton.core import KVLayout
from baton.engine.batch import Batch
from baton.engine.determinism.shapes import SHORT
from baton.engine.kernels.base import Kernels, Splits
from baton.engine.kernels.kv_levels import KVDtype
from baton.engine.kernels.quantized import Quantize
from baton.engine.kernels.select import block_copy, choose_kernels
from baton.engine.kv_cache import DTYPES, KVCache, exposed_memory
from baton.engine.models.checkpoint import Checkpoint, Progress, Weights
from baton.engine.models.config import ModelConfig, chosen_dtype, read_config
from baton.engine.models.decoder import Decoder, PredictionHead, head_prefix
from baton.engine.models.llama import Parts
from baton.engine.models.thinking import Mode, Thinker
from baton.errors import CheckpointError, ConfigError
from baton.hashing import fingerprint

log = structlog.get_logger(__name__)
DTYPE_CHOICES = ("auto", "float32", "bfloat16")


@dataclass(slots=True, eq=False)
class TransformerBackend:
    """A loaded model; implements `baton.engine.model_backend.ModelBackend`."""

    name: str
    layout: KVLayout
    vocab_size: int
    max_model_len: int
    device: torch.device
    fingerprint: str
    model: Decoder
    nondeterminism: str = ""
    thinker: Thinker | None = None
    prediction: PredictionHead | None = None  # proposes tokens; no part of the fingerprint

    def forward(self, batch: Batch, kv: KVCache) -> torch.Tensor:
        return self.model.forward(batch, kv)

    def facts(self, rows: Sequence[int]) -> tuple[str, ...]:
        return self.model.kernels.facts(rows)

    def steady_rows(self) -> int:
        """Return the limit of its kernels, or 0 if parts of the model use other products or functions."""
        config = self.model.config
        return self.model.kernels.steady_rows([config.head_dim]) if config.spec.is_steady else 0

    def make_cache(self, total_blocks: int, *, exposed: bool = False) -> KVCache:
        memory = exposed_memory(self.layout, total_blocks, self.device) if exposed else None
        return KVCache(self.layout, total_blocks, self.device, copy=block_copy(self.model.kernels), exposed=memory)

    def check(self) -> None:
        """See `ModelBackend`. The query never waits; it raises an error that any thread's work left on the GPU."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).query()

    def close(self) -> None:
        """Do nothing, because there is no other process to end."""


class Split(Protocol):
    """The part of a model that one tensor-parallel rank computes (`baton.engine.tp`)."""

    @property
    def names_the_model(self) -> bool:
        """Whether this rank computes the fingerprint, which reads all weights, including those of other ranks."""

    def config(self, whole: ModelConfig) -> ModelConfig:
        """Return the sizes of the rank's part."""

    def parts(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, kernels: Kernels) -> Parts:
        """Return the factory for the rank's parts of layers."""


def load_model(  # noqa: PLR0913  (all but one have a default)
    path: Path | str,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    block_size: int = 16,
    max_model_len: int | None = None,
    progress: Progress | None = None,
    split: Split | None = None,
    attention_splits: Splits = "auto",
    thinking: Mode = "auto",
    quantize: Quantize = "none",
    kv_dtype: KVDtype = "auto",
    predicts: bool = False,
) -> TransformerBackend:
    """Load a Hugging Face checkpoint. `split` loads one rank's part, with layout and fingerprint of the whole model.
    `dtype` auto means the checkpoint's dtype, or float32 for float16. `quantize` rounds the weights of linear layers.
    `max_model_len` None means max_position_embeddings. `predicts` loads the layer for multi-token prediction, too.
    Raises CheckpointError (file, key or tensor), or ConfigError: wrong `dtype` or `max_model_len`, no such layer.
    """
    if dtype not in DTYPE_CHOICES:
        raise ConfigError(f"model.dtype must be one of {', '.join(DTYPE_CHOICES)}, got {dtype!r}")
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    config, device = read_config(folder), torch.device(device)
    _check(config, split, quantize, kv_dtype, device)
    length, named = _max_model_len(config, max_model_len), split is None or split.names_the_model
    checkpoint = Checkpoint(folder, progress, digests=named, stored=config.quantised, packs=device.type == "cpu")
    dtype = chosen_dtype(config, dtype, _stored_dtype(config, checkpoint))
    kernels = choose_kernels(device, DTYPES[dtype], attention_splits)
    source, part = (checkpoint, DTYPES[dtype], device), config if split is None else split.config(config)
    parts = Parts(Weights(*source), kernels) if split is None else split.parts(*source, kernels)
    model, thinker, prediction = _with_weights(part, replace(parts, quantize=quantize), thinking, predicts=predicts)
    _log_widened(checkpoint, config, dtype)
    layout = _layout(config, block_size, dtype if kv_dtype == "auto" else kv_dtype)
    name = _fingerprint(checkpoint, config, dtype, layout, quantize)
    return TransformerBackend(
        name=folder.absolute().name,
        layout=layout,
        vocab_size=config.vocab_size,
        max_model_len=length,
        device=device,
        fingerprint=name if thinker is None else thinker.named(name),
        model=model,
        nondeterminism=_nondeterminism(config),
        thinker=thinker,
        prediction=prediction,
    )


def _stored_dtype(config: ModelConfig, checkpoint: Checkpoint) -> str:
    return checkpoint.stored_dtype(f"{config.names_in(checkpoint.__contains__).embed}.weight")


def _layout(config: ModelConfig, block_size: int, dtype: str) -> KVLayout:
    shape = sum(config.spec.has_kv), config.kv_heads, config.cache_dim
    return KVLayout(*shape, block_size, dtype, config.kv_tensors, config.spec.state_size)


def _check(
    config: ModelConfig, split: Split | None, quantize: Quantize, kv_dtype: KVDtype, device: torch.device
) -> None:
    _check_device(config, quantize, device)
    _check_kv(config, kv_dtype, device)
    if config.thinking is not None and split is not None:
        raise ConfigError("tensor_parallel must be 1 for a model with thinking states")


def _check_device(config: ModelConfig, quantize: Quantize, device: torch.device) -> None:
    """Reject quantised weights on GPUs, which get their weights later than they would be quantised, and models with
    parts that GPU kernels lack.
    """
    if device.type == "cpu":
        return
    if config.spec.lacks:
        raise CheckpointError(f"{config.family} has {config.spec.lacks}, not supported on {device}, only on CPUs")
    if quantize != "none":
        raise ConfigError(f"model.quantize: {quantize} is not supported on {device}, only on CPUs; use none")


def _check_kv(config: ModelConfig, kv_dtype: KVDtype, device: torch.device) -> None:
    """Reject KV in int8 where no attention reads it."""
    where = f"on {device}, only on CPUs" if device.type != "cpu" else "for latent attention" if config.latent else ""
    if any(each.head_dim for each in config.spec.attention):
        where = "for layers with other head sizes"
    if where and kv_dtype != "auto":
        raise ConfigError(f"model.kv_dtype: {kv_dtype} is not supported {where}; use auto")


def _fingerprint(checkpoint: Checkpoint, config: ModelConfig, dtype: str, layout: KVLayout, quantize: Quantize) -> str:
    rounded: list[str] = [] if quantize == "none" else [quantize]
    rounded += [] if config.quantised is None else [config.quantised.summary]
    digest = checkpoint.finish(config.unread, apart=(head_prefix(config),))
    return fingerprint((digest, dtype, layout.wire, repr(config), *config.cache_order, *rounded))


def _log_widened(checkpoint: Checkpoint, config: ModelConfig, dtype: str) -> None:
    """Log the kinds of quantised layers that are not held packed."""
    if config.quantised is not None and checkpoint.widened:
        kinds = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in checkpoint.widened})
        log.info("weights_widened", layers=", ".join(kinds), format=config.quantised.summary, dtype=dtype)


def check_prediction(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raise ConfigError if a checkpoint has no layer for multi-token prediction."""
    name = f"{head_prefix(config)}eh_proj.weight"
    if not (config.latent and config.unread_layers and name in checkpoint):
        text = f"{checkpoint.folder} has no layer for multi-token prediction of DeepSeek V3 ({name})"
        raise ConfigError(f"decode.speculation: mtp is not possible: {text}; use off, ngram or draft:PATH")


def _with_weights(
    config: ModelConfig, parts: Parts, thinking: Mode, *, predicts: bool
) -> tuple[Decoder, Thinker | None, PredictionHead | None]:
    if predicts:
        check_prediction(config, parts.weights.checkpoint)
    with closing(parts.weights):
        model = Decoder(config, parts)
        thinker = None if config.thinking is None else Thinker(config, parts, model.embed, thinking)
        prediction = PredictionHead(model, parts) if predicts else None
        parts.weights.settle()
    return model, thinker, prediction


def _nondeterminism(config: ModelConfig) -> str:
    """Return why determinism is unavailable, or "". The chunks of its grid must be whole chunks of a thinking model."""
    if config.thinking is None or SHORT % config.thinking.chunk_size == 0:
        return ""
    return f"chunks of {config.thinking.chunk_size} tokens do not divide the grid of {SHORT} tokens"


def _max_model_len(config: ModelConfig, wanted: int | None) -> int:
    if wanted is None:
        return config.max_positions
    limit, kind = config.spec.limit, config.spec.ropes[0].kind
    if 1 <= wanted <= limit:
        return wanted
    why = f"between 1 and {limit}, the range of this model's position embeddings"
    if kind in ("dynamic", "longrope"):
        why += f" ({kind} RoPE scaling ends at the original length, because cached keys would change beyond it)"
    raise ConfigError(f"model.max_model_len must be {why}; got {wanted}")
