"""From settings to an engine: the model (or the oracle), its tokenizer, and as many KV blocks as fit."""

from __future__ import annotations

import gc
from functools import partial
from typing import TYPE_CHECKING

import torch

from baton.core import Role, Sampling, SequenceSpec
from baton.engine.engine import Engine
from baton.engine.generate import generate
from baton.engine.kernels.gpu.memory import claim_activations
from baton.engine.oracle import OracleBackend, oracle_layout
from baton.engine.outcome import Counters
from baton.engine.selfcheck import checked_shapes
from baton.engine.sizing import size_kv
from baton.errors import ConfigError
from baton.hub import model_folder
from baton.tokenizer import ORACLE_MODEL, load_tokenizer
from baton.worker.loading import LoadingLog
from baton.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.engine.backend import ModelBackend


def build_engine(settings: WorkerSettings, loaded: ModelBackend | None = None) -> Engine:
    """Load the model, unless it is `loaded`, and size the pool. No engine that uses it may be left.

    Raises CheckpointError (the folder cannot be served) or ConfigError (device, memory or length do not fit).
    """
    use_threads(settings)
    backend = loaded or load_backend(settings)
    claim_activations(backend, settings.max_batched_tokens, settings.max_running)
    shapes = checked_shapes(backend, settings.shapes)
    sizing = size_kv(
        backend.layout,
        kv_memory=settings.kv_memory,
        max_model_len=settings.max_model_len,
        model_max_len=backend.max_model_len,
        device=backend.device,
    )
    engine = Engine(
        backend,
        load_tokenizer(settings.model_path),
        total_blocks=sizing.total_blocks,
        max_model_len=sizing.max_model_len,
        max_batched_tokens=settings.max_batched_tokens,
        max_running=settings.max_running,
        recompute_preempted=settings.role is Role.PREFILL,
        prefix_cache=settings.prefix_cache,
        shapes=shapes,
    )
    if settings.role is Role.DECODE and backend.device.type == "cuda" and backend.thinker is None:
        from baton.engine.kernels.gpu.graphs import with_graphs  # a CPU has no use for it

        engine.backend = with_graphs(backend, engine.kv, settings.max_running, engine.max_model_len)
    warm_up(engine)
    gc.collect()
    gc.freeze()  # what is here now stays: no later collection need look at it in the middle of a step
    return engine


def use_threads(settings: WorkerSettings) -> None:
    """From now on, in this thread and in those that are started."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)


def free_memory() -> None:
    """Give back what an engine had that nobody uses any more: its KV, and its graphs. `build_engine` froze it."""
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where none was used


def warm_up(engine: Engine) -> None:
    """Pay for what only the first prompt and the first decode step cost, and start counting after it."""
    generate(engine, SequenceSpec((0,), Sampling(max_tokens=3, temperature=0.0, ignore_eos=True)))
    engine.counters = Counters()


def load_backend(settings: WorkerSettings) -> ModelBackend:
    """The oracle for `model.path: oracle`, else the checkpoint in that folder, or downloaded by that name."""
    device = pick_device(settings.device)
    _check_ranks(settings, device)
    if settings.model_path == ORACLE_MODEL:
        return OracleBackend(oracle_layout(settings.block_size), seed=settings.seed)
    # The oracle needs no transformer.
    from baton.engine.model.build import load_model
    from baton.engine.model.config import read_config
    from baton.engine.tp.backend import Ranking, load_sharded

    folder = model_folder(settings.model_path)
    thinking = read_config(folder).thinking
    check_thinking(settings, 0 if thinking is None else thinking.chunk_size)
    loading = LoadingLog(settings.model_path)
    if settings.tensor_parallel == 1:
        load: Callable[..., ModelBackend] = partial(load_model, thinking=settings.thinking_prefill)
    else:
        load = partial(load_sharded, ranking=Ranking(settings.tensor_parallel, settings.threads, _ranks_key(settings)))
    backend = load(
        folder,
        dtype=settings.dtype,
        device=device,
        block_size=settings.block_size,
        max_model_len=None if settings.max_model_len == "auto" else settings.max_model_len,
        progress=loading,
        attention_splits=settings.attention_splits,
    )
    loading.finish(backend)
    return backend


def thinking_chunk(backend: ModelBackend) -> int:
    """How many tokens make a chunk that its model thinks about; 0: it does not think."""
    return 0 if backend.thinker is None else backend.thinker.config.chunk_size


def check_thinking(settings: WorkerSettings, chunk: int) -> None:
    """Raises ConfigError if a model that thinks about chunks of so many tokens (0: none) cannot be served like this."""
    ranks, key = settings.tensor_parallel, _ranks_key(settings)
    if chunk and ranks > 1:
        raise ConfigError(f"{key}: {ranks}: a model that thinks is not divided; {key}=1 serves it")
    if chunk and settings.block_size % chunk:
        text = f"must be a multiple of {chunk}, the tokens of a chunk that this model thinks about"
        raise ConfigError(f"{settings.role.value}.block_size: {text}, got {settings.block_size}")


def _ranks_key(settings: WorkerSettings) -> str:
    return f"{settings.role.value}.tensor_parallel"


def _check_ranks(settings: WorkerSettings, device: str) -> None:
    ranks, key = settings.tensor_parallel, _ranks_key(settings)
    if ranks > 1 and settings.model_path == ORACLE_MODEL:
        raise ConfigError(f"{key}: {ranks}: the oracle is not divided; {key}=1 serves it")
    if ranks > 1 and device != "cpu":
        text = "KV that is divided over GPUs cannot be handed over yet"
        raise ConfigError(f"{key}: {ranks} on {device}: {text}; use {key}=1, or {settings.role.value}.device=cpu")


def pick_device(device: str) -> str:
    """`auto` is the first GPU, or the CPU where there is none. Raises ConfigError for a GPU that is not there."""
    count = torch.cuda.device_count()
    if device == "auto":
        return "cuda:0" if count else "cpu"
    if device.startswith("cuda") and int(device.partition(":")[2] or 0) >= count:
        raise ConfigError(f"device: {device} is not here ({count} GPUs that torch {torch.__version__} can use)")
    return device
