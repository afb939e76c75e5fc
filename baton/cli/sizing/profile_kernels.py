"""`baton profile`: measure the fastest kernels and verify pass sizes for a model here, and keep them for workers."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.table import Table

from baton.cli.cluster.dtype import unstoppable, with_dtype
from baton.cluster.gpus import narrow
from baton.config import load_config
from baton.core import Role
from baton.engine.determinism.checks import WINDOW, measure_passes, save_passes
from baton.engine.kernels.cpu.kernel_choice import load_profile, save_profile
from baton.engine.kernels.cpu.ops import CpuKernels
from baton.engine.kernels.cpu.tuning import Point, make_profile, measure_attention, measure_linear
from baton.engine.kernels.select import profile_of
from baton.engine.models.loading import TransformerBackend
from baton.errors import ConfigError
from baton.logs import configure_logging
from baton.tokenizer import ORACLE_MODEL
from baton.worker.engine_factory import load_backend, passes_path, pick_device
from baton.worker.settings import WorkerSettings, from_config


def profile_kernels(file: Path, sets: list[str], *, as_json: bool) -> None:
    """Measure for each number of threads of a cluster file's pools. Raises ConfigError, CheckpointError."""
    configure_logging("warning", "auto")
    config = load_config(file, sets, os.environ)
    if not torch.cuda.device_count():
        config = with_dtype(config, (), unstoppable)  # as `baton up` does
    for role in Role:
        config = narrow(config, role, os.environ)  # kernels run on the current device, which is the first one
    pools = {settings.threads: settings for settings in (from_config(config, role, "profile") for role in Role)}
    reports = [_profile_pool(settings) for settings in pools.values()]
    if as_json:
        typer.echo(json.dumps(reports))


def _profile_pool(settings: WorkerSettings) -> dict[str, object]:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if settings.model_path == ORACLE_MODEL:
        raise _nothing_to_profile(settings)
    kernels = _profile_kernels(settings) if pick_device(settings.device) == "cpu" else {}
    return {**kernels, "quantize": settings.quantize, "verify_passes": _profile_passes(settings)}


def _profile_passes(settings: WorkerSettings) -> dict[str, object]:
    """Measure verify passes. The model is loaded anew, with the kernels that workers will choose."""
    backend, path, console = load_backend(settings), passes_path(settings), Console(stderr=True)
    if backend.layout.state_size:
        console.print("verify passes of models with recurrent layers are not measured; determinism.rows sets them")
        return {}
    try:
        passes = measure_passes(backend, settings.max_running)
    finally:
        backend.close()
    save_passes(path, passes)
    total = passes.best(exact=settings.shapes.exact_rows > 0)
    for tokens, seconds in passes.seconds.items():
        console.print(f"verify pass of {tokens // WINDOW} x {WINDOW}: {seconds / tokens * 1e6:.0f} us per token")
    steady = f"decode steps can be exact up to {passes.steady} tokens" if passes.steady else "no decode step is exact"
    console.print(f"verify passes: {total // WINDOW} x {WINDOW} ({steady}); kept in {path}")
    return {"path": str(path), "rows": total // WINDOW, "window": WINDOW, **asdict(passes)}


def _profile_kernels(settings: WorkerSettings) -> dict[str, object]:
    backend = load_backend(settings)
    kernels = backend.model.kernels if isinstance(backend, TransformerBackend) else None
    if not (isinstance(backend, TransformerBackend) and isinstance(kernels, CpuKernels)):
        raise _nothing_to_profile(settings)
    console = Console(stderr=True)
    points: list[Point] = []
    for width, k in sorted(kernels.shapes):
        console.print(f"measuring [{width}, {k}] with {torch.get_num_threads()} threads ...")
        points += measure_linear(kernels, width, k)
    layout, config = backend.layout, backend.model.config
    attention = None
    if layout.tensors == ("k", "v"):
        attention = measure_attention(kernels, config.heads, layout.kv_heads, layout.head_dim)
    return _keep(kernels, points, attention)


def _nothing_to_profile(settings: WorkerSettings) -> ConfigError:
    reason = "does not run on the compiled CPU kernels here; nothing to profile"
    return ConfigError(f"model.path: {settings.model_path} {reason}")


def _keep(kernels: CpuKernels, points: list[Point], attention: list[float] | None) -> dict[str, object]:
    path, found = profile_of(kernels.dtype), make_profile(points, attention)
    save_profile(path, load_profile(path).merged(found))
    table = Table("weight", "rows", "flat GFLOP/s", "tall GFLOP/s", "torch GFLOP/s", "flat GB/s")
    for p in points:
        work, size = 2 * p.width * p.k * p.rows / 1e9, p.width * p.k * kernels.dtype.itemsize / 1e9
        rates = (f"{work / seconds:.0f}" for seconds in (p.flat_s, p.tall_s, p.torch_s))
        table.add_row(f"{p.width} x {p.k}", str(p.rows), *rates, f"{size / p.flat_s:.1f}")
    console = Console(stderr=True)
    console.print(table)
    for (width, k), (rows, tall) in sorted(found.choices.items()):
        console.print(f"{width} x {k}: flat kernel up to {rows} rows, then {'the tall one' if tall else 'torch'}")
    if attention is not None:
        unified = "preset" if found.unified_max is not None else "running"
        times = f"running {attention[0] * 1e6:.0f} us, preset {attention[1] * 1e6:.0f} us"
        console.print(f"attention: {unified} maximum ({times})")
    dtype = str(kernels.dtype).removeprefix("torch.")
    console.print(f"kept in {path}, for {kernels.level} with {dtype}")
    return {
        "path": str(path),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "level": kernels.level,
        "choices": {f"{width}x{k}": choice._asdict() for (width, k), choice in sorted(found.choices.items())},
        "unified_max": found.unified_max,
        "points": [p._asdict() for p in points],
    }
