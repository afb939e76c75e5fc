"""A model folder into a backend whose layers run in `transformers`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import file_digest
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from baton.clock import SystemClock
from baton.core import KVLayout
from baton.engine.batch import Batch
from baton.engine.kernels.base import Kernels, Splits
from baton.engine.kernels.select import block_copy, choose_kernels
from baton.engine.kv_cache import DTYPES, KVCache, exposed_memory
from baton.engine.models.checkpoint import Checkpoint, LoadProgress, Progress, weight_files
from baton.engine.models.config import dtype_of, dtype_origin
from baton.engine.models.fallback import attention, guard, self_check
from baton.engine.models.json_fields import Fields, read_json_object
from baton.engine.models.thinking import Thinker
from baton.errors import CheckpointError, ConfigError
from baton.hashing import fingerprint

PROBE_TOKENS = 3
VERSION = f"transformers {transformers.__version__}"
EXPERTS_VARY = "transformers computes experts in groups of rows that depend on the batch"


@dataclass(slots=True, eq=False)
class FallbackBackend:
    """A model of transformers; implements `baton.engine.model_backend.ModelBackend`."""

    name: str
    layout: KVLayout
    vocab_size: int
    max_model_len: int
    device: torch.device
    fingerprint: str
    model: PreTrainedModel
    kernels: Kernels
    nondeterminism: str
    thinker: Thinker | None = None

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        self.kernels.begin(batch)
        forward = attention.PagedForward(batch, kv, self.kernels)
        positions = batch.positions.clamp(max=self.max_model_len - 1)  # padding goes beyond a table of positions
        with attention.running(forward):
            logits = logits_of(self.model, batch.token_ids, positions, batch.logit_rows)
        forward.finish()
        return logits

    def facts(self, rows: Sequence[int]) -> tuple[str, ...]:
        return (VERSION, *self.kernels.facts(rows))

    def steady_rows(self) -> int:
        """Return 0, because transformers leaves its products to torch."""
        return 0

    def make_cache(self, total_blocks: int, *, exposed: bool = False) -> KVCache:
        memory = exposed_memory(self.layout, total_blocks, self.device) if exposed else None
        return KVCache(self.layout, total_blocks, self.device, copy=block_copy(self.kernels), exposed=memory)

    def check(self) -> None:
        """See `ModelBackend`. The query never waits; it raises an error that any thread's work left on the GPU."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).query()

    def close(self) -> None:
        """Do nothing, because there is no other process to end."""


def logits_of(model: PreTrainedModel, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    """Return logits of `rows`, float32 [len(rows), vocab_size], for tokens [N] at these positions."""
    # A mask of ones: transformers takes the packed sequences for one, and `attend` separates them.
    inputs: dict[str, Any] = {"attention_mask": torch.ones_like(tokens)[None], "position_ids": positions[None]}
    picks = "logits_to_keep" in inspect.signature(model.forward).parameters
    if picks:
        inputs["logits_to_keep"] = rows
    logits: Tensor = model(input_ids=tokens[None], use_cache=False, **inputs).logits[0]
    return (logits if picks else logits[rows]).float()


def load_transformers(
    path: Path | str,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    block_size: int = 16,
    max_model_len: int | None = None,
    progress: Progress | None = None,
    attention_splits: Splits = "auto",
) -> FallbackBackend:
    """Load a checkpoint into its class of transformers. Parameters are those of `load_model`. Raises CheckpointError if
    the folder cannot be served, and ConfigError if `max_model_len` is invalid.
    """
    folder, device = Path(path), torch.device(device)
    fields = Fields(str(folder / "config.json"), read_json_object(folder / "config.json"))
    config = guard.checked_config(fields, str(folder))
    guard.check_class(config)
    limit = guard.positions_limit(config)
    if not 1 <= (max_model_len or limit) <= limit:
        raise ConfigError(f"model.max_model_len must be between 1 and {limit} for this model; got {max_model_len}")
    kind = _chosen_dtype(folder, config, dtype, dtype_origin(fields))
    digest = _digest(folder, progress)
    attention.register()
    model = _with_weights(folder, DTYPES[kind]).to(device)
    probe, vocab_size = _probed(model, device)
    layout = KVLayout(len(probe.layers), probe.kv_heads, probe.width, block_size, kind, ("k", "v"))
    backend = FallbackBackend(
        name=folder.absolute().name,
        layout=layout,
        vocab_size=vocab_size,
        max_model_len=max_model_len or limit,
        device=device,
        fingerprint=fingerprint((VERSION, digest, repr(fields.values), kind, layout.wire)),
        model=model,
        kernels=choose_kernels(device, DTYPES[kind], attention_splits),
        nondeterminism=EXPERTS_VARY if guard.has_experts(model) else "",
    )
    architecture = type(model).__name__
    with guard.foreign(architecture, "failed in the check at load"):
        self_check.check(backend, partial(_reference, model), architecture)
    return backend


def _chosen_dtype(folder: Path, config: PretrainedConfig, wanted: str, origin: str) -> str:
    """Return the dtype as for native models. Raises CheckpointError for quantised weights and incomplete files."""
    checkpoint = Checkpoint(folder, digests=False)
    with safe_open(weight_files(folder)[0], framework="pt") as first:
        found = [checkpoint.stored_dtype(name) for name in first.keys()]  # noqa: SIM118  (no mapping)
    checkpoint.finish(("",))
    declared = None if config.dtype is None else str(config.dtype).removeprefix("torch.")
    stored = next((each for each in found if each != "unknown"), "unknown")  # masks may come before weights
    return dtype_of(declared, wanted, stored, origin)


def _digest(folder: Path, progress: Progress | None) -> str:
    """Return the digest of all weight files, which are in the page cache then."""
    files, clock, digests, done, tensors = weight_files(folder), SystemClock(), list[str](), 0, 0
    began, total = clock.monotonic(), sum(file.stat().st_size for file in files)
    for file in files:
        with file.open("rb") as stream, safe_open(file, framework="pt") as opened:
            digests.append(file_digest(stream, xxhash.xxh3_128).hexdigest())
            tensors += len(opened.keys())
        done += file.stat().st_size
        if progress is not None:
            progress(LoadProgress(done, total, tensors, clock.monotonic() - began))
    return ",".join(digests)


def _with_weights(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    with guard.foreign(str(folder), "cannot be loaded by transformers"):
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention.NAME,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(name for name in map(str, found[problem]) if not name.endswith(".masked_bias"))  # of GPT-2
        if names:
            raise CheckpointError(f"{folder}: {problem.replace('_keys', ' tensors')}: {', '.join(names[:3])}")
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def _probed(model: PreTrainedModel, device: torch.device) -> tuple[attention.Probe, int]:
    """Return the layers and the width of the logits."""
    probe, tokens = attention.Probe(device), torch.zeros(PROBE_TOKENS, dtype=torch.int64, device=device)
    positions = torch.arange(PROBE_TOKENS, device=device)
    with guard.foreign(type(model).__name__, "is not supported"), attention.running(probe):
        width = logits_of(model, tokens, positions, positions).shape[1]
        if not probe.layers:
            raise CheckpointError("no layer uses the attention interface of transformers")
        if why := guard.attention_elsewhere(model, probe.layers):
            raise CheckpointError(f"{why} does not use the attention interface of transformers")
    return probe, width


@torch.inference_mode()
def _reference(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return all logits of one sequence as transformers computes them, by its own attention."""
    positions = torch.arange(len(tokens), device=tokens.device)
    model.set_attn_implementation("eager")
    try:
        return logits_of(model, tokens, positions, positions)
    finally:
        model.set_attn_implementation(attention.NAME)
