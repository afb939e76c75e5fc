"""Speculation of a decode worker: the drafter of `decode.speculation`, and the steps in which it can be exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import structlog

from baton.core import KVLayout, Role
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.model_backend import ModelBackend
from baton.engine.speculation.checks import EqualRows, equal_rows
from baton.engine.speculation.draft import DraftModel
from baton.engine.speculation.forwards import SpeculationOptions
from baton.engine.speculation.proposer import Proposer
from baton.engine.speculation.suffix_index import NgramProposer
from baton.errors import ConfigError
from baton.hashing import fingerprint
from baton.tokenizer import ORACLE_MODEL, load_tokenizer
from baton.worker.settings import WorkerSettings

KEY, DRAFT, MTP = "decode.speculation", "draft:", "mtp"
ON_GPU = "steps on a GPU are launched before the tokens of the step before are known"
ROUNDING_ROWS = 16  # of a step where rows round differently, and the cluster file wants speculation all the same
log = structlog.get_logger(__name__)


def speculation_of(
    settings: WorkerSettings,
    backend: ModelBackend,
    shapes: FixedShapes | None,
    load: Callable[[WorkerSettings], ModelBackend],
) -> SpeculationOptions | None:
    """Return the options of the engine, or None for no speculation. `load` loads the model of a draft. Makes a cache,
    so the backend's previous one must not be used again. Raises ConfigError if the cluster file wants what the model
    or the device cannot do, and CheckpointError for a draft that cannot be served.
    """
    wanted = settings.speculation
    if wanted == "off" or settings.role is not Role.DECODE:
        return None
    reason = unsupported(backend)
    if reason and wanted != "auto":
        raise ConfigError(f"{KEY}: {wanted} is not possible: {reason}; use off or auto")
    found = None if reason else equal_rows(backend, settings.max_batched_tokens)
    if found is None and wanted == "auto":
        log.info("speculation_off", reason=reason or "a row of a larger step may round differently here")
        return None
    if found is None:
        log.warning("speculation_rounds", rows=ROUNDING_ROWS)
        found = EqualRows(min(ROUNDING_ROWS, settings.max_batched_tokens), fixed=False, deterministic=False)
    drafter = drafter_of(settings, backend, load)
    log.info("speculation_on", drafter=drafter.name, rows=found.rows, fixed=found.fixed)
    exact_rows = shapes.exact_rows if shapes else 0
    return SpeculationOptions(drafter, found.rows, found.fixed, exact_rows, deterministic=found.deterministic)


def reserved(settings: WorkerSettings, speculation: SpeculationOptions | None, blocks: int, layout: KVLayout) -> int:
    """Return how many of the KV blocks the drafter leaves. Raises ConfigError if `max_model_len` does not fit there."""
    left = blocks if speculation is None else speculation.proposer.reserve(blocks, layout)
    wanted, room = settings.max_model_len, left * layout.block_size
    if left < blocks and isinstance(wanted, int) and room < wanted:
        text = f"the KV of {settings.speculation} leaves room for {room} tokens, but model.max_model_len is {wanted}"
        raise ConfigError(f"{KEY}: {text}; set a larger decode.kv_memory or a smaller max_model_len")
    return left


def drafter_of(
    settings: WorkerSettings, backend: ModelBackend, load: Callable[[WorkerSettings], ModelBackend]
) -> Proposer:
    """Return the drafter of the cluster file. `load_backend` loaded the layer of `mtp`, or refused the setting."""
    _, _, path = settings.speculation.partition(DRAFT)
    if path:
        return draft_of(settings, path, backend, load)
    if settings.speculation != MTP:
        return NgramProposer()
    from baton.engine.models.loading import TransformerBackend  # the oracle needs no transformer
    from baton.engine.speculation.prediction import PredictionModel

    assert isinstance(backend, TransformerBackend)
    assert backend.prediction is not None
    return PredictionModel(backend, backend.prediction)


def predicts(settings: WorkerSettings, device: str) -> bool:
    """Return whether the model is loaded with its layer for multi-token prediction. Raises ConfigError if `mtp` is not
    possible with these settings.
    """
    if settings.speculation != MTP:
        return False
    ranks, found = settings.tensor_parallel, ""
    if settings.model_path == ORACLE_MODEL:
        found = "the oracle has no layer for multi-token prediction"
    if ranks > 1:
        found = f"decode.tensor_parallel is {ranks}, and the layer for multi-token prediction needs 1"
    if device != "cpu":
        found = ON_GPU
    if found:
        raise ConfigError(f"{KEY}: {MTP} is not possible: {found}; use off or auto")
    return True


def draft_of(
    settings: WorkerSettings, path: str, backend: ModelBackend, load: Callable[[WorkerSettings], ModelBackend]
) -> DraftModel:
    """Return the drafter with the model in `path`. Raises ConfigError if its vocabulary is another one."""
    small = replace(settings, model_path=path, quantize="none", kv_dtype="auto", tensor_parallel=1)
    found = load(replace(small, max_model_len="auto", block_size=backend.layout.block_size))
    if reason := unsupported(found):
        raise ConfigError(f"{KEY}: {DRAFT}{path} is not possible: {reason}")
    if found.vocab_size != backend.vocab_size:
        sizes = f"{found.vocab_size} tokens, but {settings.model_path} has {backend.vocab_size}"
        raise ConfigError(f"{KEY}: the vocabulary of {path} has {sizes}; a draft needs the same one")
    ours, theirs = (fingerprint([str(load_tokenizer(each).vocabulary())]) for each in (settings.model_path, path))
    if ours != theirs:
        raise ConfigError(f"{KEY}: {path} has another tokenizer than {settings.model_path}; a draft needs the same one")
    return DraftModel(found)


def unsupported(backend: ModelBackend) -> str:
    """Return why steps of this model on this device cannot have proposals, or ""."""
    if backend.device.type != "cpu":
        return ON_GPU
    if backend.thinker is not None:
        return "the model thinks while it reads, and a thought cannot be taken back"
    return "the states of its recurrent layers cannot be taken back" if backend.layout.state_size else ""
