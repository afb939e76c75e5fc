"""From settings to an engine: the model (or the oracle), its tokenizer, and as many KV blocks as fit.

Read `build_engine` first. `generate` runs one request in one process; every distributed run must equal it. `settled`
fills in the host's part of the settings: addresses, and the shape of verify passes (measured, else the preset).
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil
import structlog
import torch

from baton.core import Finish, HandoffId, Role, Sampling, SequenceSpec, Token
from baton.engine.determinism.checks import WINDOW, checked_shapes, load_passes
from baton.engine.engine import Engine
from baton.engine.kernels.cpu.compiler import level_here, machine
from baton.engine.kernels.gpu.cuda_memory import can_expose
from baton.engine.kernels.gpu.flash_attention import BLOCK_MULTIPLE
from baton.engine.kernels.gpu.shapes import WIDEST_HEAD
from baton.engine.kernels.gpu.warm_up import claim_activations, warm_forwards
from baton.engine.kernels.select import level_in_use
from baton.engine.kv_cache import DTYPES, size_kv
from baton.engine.model_backend import ModelBackend
from baton.engine.oracle import OracleBackend, oracle_layout
from baton.engine.step_result import Counters
from baton.errors import ConfigError, EngineFault
from baton.hashing import fingerprint
from baton.home import baton_home
from baton.model_hub import model_folder
from baton.tokenizer import ORACLE_MODEL, load_tokenizer
from baton.worker.settings import WorkerSettings, located
from baton.worker.speculation_choice import MTP, predicts, reserved, speculation_of

if TYPE_CHECKING:
    from baton.engine.models.checkpoint import LoadProgress


class Generation(NamedTuple):
    """New tokens, their text (tail included) and the finish of the choice."""

    tokens: list[Token]
    text: str
    finish: Finish


def generate(engine: Engine, spec: SequenceSpec) -> Generation:
    """Run `spec` to its end on an idle engine. Raises InvalidRequest if it can never be computed, or EngineFault."""
    key, tokens, finish, under_way = HandoffId("generate", 0), list[Token](), None, False
    engine.submit(key, spec)
    while finish is None or under_way:  # a further step may be under way at the end
        result = engine.step()
        under_way = result.under_way
        if result.failed:
            raise result.failed[0][1]
        if result.idle:
            engine.release(key)
            raise EngineFault("the block pool is full")
        for output in result.outputs:
            tokens += output.tokens
            finish = output.finish
    return Generation(tokens, "".join(t.text for t in tokens) + finish.tail, finish)


log = structlog.get_logger(__name__)
EVERY_S = 2.0
DEFAULT_BLOCK = 16  # tokens
FREE_TRIES, FREE_PAUSE_S = 10, 0.1
GB = 1e9


class LoadingLog:
    """Logs `model_loading` at the start and then at most every 2 s, and `model_loaded` once."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._last: LoadProgress | None = None
        self._next_s = 0.0

    def __call__(self, progress: LoadProgress) -> None:
        self._last = progress
        if progress.seconds < self._next_s:
            return
        self._next_s = progress.seconds + EVERY_S
        percent = int(100 * progress.bytes_done / progress.bytes_total)
        done, total = round(progress.bytes_done / GB, 3), round(progress.bytes_total / GB, 3)
        log.info("model_loading", model=self._model, percent=percent, gb=done, of_gb=total)

    def finish(self, backend: ModelBackend, code: str) -> None:
        """Log that the model is loaded. `resident_gb` is the host memory of the whole process."""
        if (last := self._last) is None:
            return
        log.info(
            "model_loaded",
            model=self._model,
            dtype=backend.layout.dtype,
            backend=code,
            device=str(backend.device),
            tensors=last.tensors,
            seconds=round(last.seconds, 2),
            gb=round(last.bytes_done / GB, 3),
            gb_per_s=round(last.bytes_done / GB / max(last.seconds, 1e-3), 2),
            resident_gb=round(psutil.Process().memory_info().rss / GB, 3),
        )


def build_engine(settings: WorkerSettings, loaded: ModelBackend | None = None) -> Engine:
    """Load the model, unless it is `loaded`, and size the pool. Any earlier engine of that model must be gone. Raises
    CheckpointError (the folder cannot be served) or ConfigError (device, memory or length do not fit).
    """
    use_threads(settings)
    backend = loaded or load_backend(settings)
    claim_activations(backend, settings.max_batched_tokens, settings.max_running)
    shapes = checked_shapes(backend, settings.shapes)
    speculation = speculation_of(settings, backend, shapes, load_backend)
    sizing = size_kv(
        backend.layout,
        kv_memory=settings.kv_memory,
        max_model_len=settings.max_model_len,
        model_max_len=backend.max_model_len,
        device=backend.device,
        ranks=settings.tensor_parallel,
        key=f"{settings.role.value}.kv_memory",
        sequences=settings.max_running,
        deterministic=shapes is not None,
    )
    engine = Engine(
        backend,
        load_tokenizer(settings.model_path),
        total_blocks=reserved(settings, speculation, sizing.total_blocks, backend.layout),
        max_model_len=sizing.max_model_len,
        max_batched_tokens=settings.max_batched_tokens,
        max_running=settings.max_running,
        recompute_preempted=settings.role is Role.PREFILL,
        prefix_cache=settings.prefix_cache,
        shapes=shapes,
        exposed=exposes_kv(settings, backend.device),
        state_slots=sizing.state_slots,
        speculation=speculation,
    )
    if settings.role is Role.DECODE and backend.device.type == "cuda" and backend.thinker is None:
        from baton.engine.kernels.gpu.cuda_graphs import with_graphs  # never needed on a CPU

        engine.backend = with_graphs(backend, engine.kv, engine.inputs.widest())
    if backend.device.type == "cuda":
        limits = settings.max_batched_tokens, settings.max_running, engine.max_model_len
        warm_forwards(engine.backend, engine.kv, *limits)
    warm_up(engine)
    gc.collect()
    gc.freeze()  # permanent objects: no collection scans them in the middle of a step
    return engine


def exposes_kv(settings: WorkerSettings, device: torch.device) -> bool:
    """Whether other processes shall read the KV here. Caches of decode workers stay private unless a transport that
    reads is named: attention on CPUs is slower on the ordinary pages that shared memory often has.
    """
    wanted, named = settings.transfer.transport, "shm" if device.type == "cpu" else "cuda_ipc"
    if (device.type != "cpu" and settings.tensor_parallel > 1) or wanted not in {"auto", named}:
        return False
    return wanted == named or (settings.role is Role.PREFILL and can_expose(device))


def use_threads(settings: WorkerSettings) -> None:
    """Set torch's thread count, for this thread and threads started later."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)


def free_memory(kv: Callable[[], object]) -> None:
    """Free a retired engine's cache and CUDA graphs, which `build_engine` excluded from collection. `kv` returns None
    when the cache is freed. While another thread collects, a collection here does nothing, so it is repeated.
    A cache that something still refers to is logged.
    """
    gc.unfreeze()
    for _ in range(FREE_TRIES):
        gc.collect()
        if kv() is None:
            break
        time.sleep(FREE_PAUSE_S)
    else:
        log.warning("old_cache_in_use", tries=FREE_TRIES)
    torch.cuda.empty_cache()  # no-op without CUDA


def warm_up(engine: Engine) -> None:
    """Run the first prompts and decode steps, which cost extra, and reset the counters."""
    for spec in warm_up_specs(engine.backend):
        generate(engine, spec)
    engine.counters = Counters()


def warm_up_specs(backend: ModelBackend) -> list[SequenceSpec]:
    """Return the requests of `warm_up`. On a GPU, kinds of sampling and deterministic requests have own kernels."""
    greedy = Sampling(max_tokens=3, temperature=0.0, ignore_eos=True)
    specs = [SequenceSpec((0,), greedy)]
    if backend.device.type == "cuda":
        drawn = replace(greedy, temperature=1.0)
        kinds = drawn, replace(drawn, top_p=0.9), replace(drawn, top_k=4, min_p=0.1)
        specs += [SequenceSpec((0,), sampling) for sampling in kinds]
        specs += [SequenceSpec((0, 0), greedy, deterministic=True)] if not backend.nondeterminism else []
    return specs


def load_backend(settings: WorkerSettings) -> ModelBackend:
    """Load the oracle for `model.path: oracle`, else the checkpoint in that folder, downloaded if it is a hub name. A
    model without a native family runs in transformers.
    """
    device = pick_device(settings.device, f"{settings.role.value}.device")
    _check_ranks(settings)
    predicting = predicts(settings, device)
    if settings.model_path == ORACLE_MODEL:
        if settings.kv_dtype != "auto":
            raise ConfigError(f"model.kv_dtype: {settings.kv_dtype} is not supported for the oracle; use auto")
        return OracleBackend(oracle_layout(block_size_of(settings)), seed=settings.seed)
    # Imported late because the oracle needs no transformer.
    from baton.engine.models.config import read_config
    from baton.engine.models.loading import load_model
    from baton.engine.tp.backend import Ranking, load_sharded

    if served_by(settings):
        return _load_fallback(settings, model_folder(settings.model_path), device)
    config = read_config(model_folder(settings.model_path, weights=False))
    folder = model_folder(settings.model_path)
    check_heads(settings, device, config.head_dim)
    thinking = config.thinking
    chunk = 0 if thinking is None else thinking.chunk_size
    check_thinking(settings, chunk)
    loading = LoadingLog(settings.model_path)
    if settings.tensor_parallel == 1:
        load: Callable[..., ModelBackend] = partial(load_model, thinking=settings.thinking_prefill, predicts=predicting)
    else:
        load = partial(load_sharded, ranking=Ranking(settings.tensor_parallel, settings.threads, _ranks_key(settings)))
    backend = load(
        folder,
        dtype=settings.dtype,
        device=device,
        block_size=block_size_of(settings, chunk),
        max_model_len=None if settings.max_model_len == "auto" else settings.max_model_len,
        progress=loading,
        attention_splits=settings.attention_splits,
        quantize=settings.quantize,
        kv_dtype=settings.kv_dtype,
    )
    loading.finish(backend, "native")
    return backend


def _load_fallback(settings: WorkerSettings, folder: Path, device: str) -> ModelBackend:
    """Load a model into transformers. Raises ConfigError for a setting that only native families support."""
    given: dict[str, str] = {"model.quantize": settings.quantize, "model.kv_dtype": settings.kv_dtype}
    given[_ranks_key(settings)] = str(settings.tensor_parallel)
    given["decode.speculation"] = settings.speculation if settings.speculation == MTP else "none"
    for key, value in given.items():
        if value not in {"none", "auto", "1"}:
            raise ConfigError(f"{key}: {value} is not supported for {folder}, which runs in transformers")
    from baton.engine.models.fallback.loading import VERSION, load_transformers  # an extra

    loading = LoadingLog(settings.model_path)
    backend = load_transformers(
        folder,
        dtype=settings.dtype,
        device=device,
        block_size=block_size_of(settings),
        max_model_len=None if settings.max_model_len == "auto" else settings.max_model_len,
        progress=loading,
        attention_splits=settings.attention_splits,
    )
    check_heads(settings, device, backend.layout.head_dim)
    loading.finish(backend, VERSION)
    return backend


def served_by(settings: WorkerSettings) -> str:
    """Return the code of the layers, such as "transformers 5.23.0", or "". Raises as `chosen_backend` does."""
    if settings.model_path == ORACLE_MODEL:
        return ""
    from baton.engine.models.fallback import choice  # the oracle needs no transformer

    native = choice.chosen_backend(model_folder(settings.model_path, weights=False), settings.backend) == "native"
    return "" if native else f"transformers {choice.transformers_version()}"


def thinking_chunk(backend: ModelBackend) -> int:
    """Return the tokens of a chunk that the model thinks about, or 0 if it does not think."""
    return 0 if backend.thinker is None else backend.thinker.config.chunk_size


def block_size_of(settings: WorkerSettings, chunk: int = 0) -> int:
    """Return the tokens of a KV block. `auto` means 256 for prefill workers on GPUs, else 16. A thinking model rounds
    them up to whole chunks of `chunk` tokens.
    """
    if settings.block_size != "auto":
        return settings.block_size
    prefills = settings.role is Role.PREFILL and settings.model_path != ORACLE_MODEL
    least = BLOCK_MULTIPLE if prefills and pick_device(settings.device) != "cpu" else DEFAULT_BLOCK
    return -(-least // max(chunk, 1)) * max(chunk, 1)


def check_thinking(settings: WorkerSettings, chunk: int) -> None:
    """Raise ConfigError if a model with chunks of `chunk` tokens (0: does not think) does not fit the settings."""
    ranks, key = settings.tensor_parallel, _ranks_key(settings)
    if chunk and ranks > 1:
        raise ConfigError(f"{key}: {ranks}: a thinking model cannot be divided over ranks; use {key}=1")
    if chunk and settings.block_size != "auto" and settings.block_size % chunk:
        text = f"must be a multiple of {chunk}, the tokens of one chunk of this thinking model"
        raise ConfigError(f"{settings.role.value}.block_size: {text}, got {settings.block_size}")


def check_heads(settings: WorkerSettings, device: str, head_dim: int) -> None:
    """Raise ConfigError for a model whose attention has no GPU kernel. The heads of latent attention are its cache's
    rows, `head_dim` numbers.
    """
    if device != "cpu" and head_dim > WIDEST_HEAD:
        key, text = (
            f"{settings.role.value}.device",
            f"no GPU kernel for heads wider than {WIDEST_HEAD} or latent attention",
        )
        raise ConfigError(f"{key}: {device}: {settings.model_path} has heads of {head_dim}: {text}; use {key}=cpu")


def _ranks_key(settings: WorkerSettings) -> str:
    return f"{settings.role.value}.tensor_parallel"


def _check_ranks(settings: WorkerSettings) -> None:
    ranks, key = settings.tensor_parallel, _ranks_key(settings)
    if ranks > 1 and settings.model_path == ORACLE_MODEL:
        raise ConfigError(f"{key}: {ranks}: the oracle cannot be divided over ranks; use {key}=1")


def pick_device(device: str, key: str = "device") -> str:
    """Resolve `cuda` to the first GPU, and `auto` to it or the CPU. Raises ConfigError if the named GPU is missing."""
    count = torch.cuda.device_count()
    device = "cuda:0" if device == "cuda" else device
    if device == "auto":
        return "cuda:0" if count else "cpu"
    if device.startswith("cuda") and int(device.partition(":")[2] or 0) >= count:
        seen = f"{count} GPUs that torch {torch.__version__} can use"
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise ConfigError(f"{key}: {device} is not available ({seen}; CUDA_VISIBLE_DEVICES is {listed})")
    return device


def level_of(settings: WorkerSettings, dtype: str) -> str:
    """Return the level of CPU kernels of a worker with KV of `dtype`, "none" for torch's, "" for a GPU or oracle."""
    if settings.model_path == ORACLE_MODEL or pick_device(settings.device) != "cpu":
        return ""
    if dtype == "int8":  # KV: the model computes with another one, and all have the same level
        dtype = "bfloat16" if settings.dtype == "bfloat16" else "float32"
    return level_in_use(DTYPES[dtype])


def weight_format(settings: WorkerSettings) -> str:
    """Return how the weights of linear layers are kept: "none", "int8", "int4", or the format of the checkpoint. The
    projection from which latent attention takes two matrices is always in the model's dtype.
    """
    if settings.quantize != "none" or settings.model_path == ORACLE_MODEL or served_by(settings):
        return settings.quantize
    from baton.engine.models.config import read_config  # the oracle needs no transformer

    config = read_config(model_folder(settings.model_path, weights=False))
    stored, but = config.quantised, "" if config.latent is None else " except kv_b_proj"
    if stored is None:
        return "none"
    return stored.summary + (but if stored.packs and pick_device(settings.device) == "cpu" else ", widened")


def passes_path(settings: WorkerSettings) -> Path:
    """Return the file with the measured times of verify passes. Workers share it if they have the same processor or
    GPU, torch, model shape, number of ranks and threads, and the same dtype, level and weight format, which the name
    has. Raises CheckpointError or OSError without a model.
    """
    device, model = pick_device(settings.device), model_folder(settings.model_path, weights=False)
    if device == "cpu":
        threads = torch.get_num_threads() if settings.threads is None else settings.threads
        here = machine().model, *sorted(machine().flags), f"{threads} threads"
        level = level_here()
    else:
        here = (torch.cuda.get_device_properties(torch.device(device)).name,)
        level = "gpu"
    facts = (
        (model / "config.json").read_text(),
        settings.kv_dtype + served_by(settings),
        f"{settings.tensor_parallel} ranks",
    )
    kind = f"{settings.dtype}-{settings.quantize}-{level}"
    return baton_home() / "profile" / f"{fingerprint((*facts, torch.__version__, *here))}-{kind}-passes.json"


def settled(settings: WorkerSettings) -> WorkerSettings:
    """Return settings with this host's addresses and verify-pass shape; logs the shape. Raises ConfigError."""
    settings = located(settings)
    shapes, source = settings.shapes, "preset" if settings.auto_rows else "config"
    if settings.auto_rows and shapes.tokens % WINDOW == 0 and settings.model_path != ORACLE_MODEL:
        try:
            passes = load_passes(passes_path(settings))
        except OSError:  # loading the model raises a better error
            passes = None
        if passes is not None:
            source, total = "profile", passes.best(exact=shapes.exact_rows > 0)
            shapes = replace(shapes, rows=max(1, total // shapes.tokens))
    log.info("verify_passes", rows=shapes.rows, tokens=shapes.tokens, source=source)
    return replace(settings, shapes=shapes)
