"""`model.dtype: auto` of a cluster whose workers compute on the CPUs of this host: one process decides for all.

Workers on other hosts and workers started by hand resolve `auto` to the checkpoint's dtype, which is the same anywhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from baton.cluster.gpus import ON_THIS_HOST, gpu_pools
from baton.config import ClusterConfig
from baton.engine.memory.host_memory import total_bytes
from baton.model_hub import model_folder
from baton.tokenizer import ORACLE_MODEL

Output = Callable[[Sequence[str]], str | None]  # of a child process with this Python, None if it fails
ROOM = 0.5  # share of the host's memory that float32 weights of all workers may take; KV needs the rest


def with_dtype(config: ClusterConfig, gpus: Sequence[str], output: Output) -> ClusterConfig:
    """Return the config with `auto` replaced by the measured dtype, or unchanged where nothing is to be chosen."""
    folder = _measurable(config, gpus)
    if folder is None or not _float32_fits(config, folder):
        return config
    threads = 0 if config.decode.threads == "auto" else config.decode.threads
    dtype = (output(("-m", "baton.worker.dtype_choice", str(folder), str(threads))) or "").strip()
    if dtype not in {"bfloat16", "float32"}:
        typer.echo("model.dtype: auto was not measured, so workers take the checkpoint's dtype", err=True)
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def _measurable(config: ClusterConfig, gpus: Sequence[str]) -> Path | None:
    """Return the folder of a bfloat16 checkpoint for which `auto` is to be measured on this host, or None."""
    model = config.model
    fixed = model.dtype != "auto" or model.quantize != "none" or model.path == ORACLE_MODEL
    fixed = fixed or model.backend == "transformers"
    if fixed or config.ray.address not in ON_THIS_HOST or gpu_pools(config, len(gpus)):
        return None
    folder = model_folder(model.path, weights=False)
    try:
        fields = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None  # loading the model raises a better error
    if not isinstance(fields, dict) or "quantization_config" in fields:
        return None
    return folder if fields.get("dtype", fields.get("torch_dtype")) == "bfloat16" else None


def _float32_fits(config: ClusterConfig, folder: Path) -> bool:
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    workers = config.prefill.replicas + config.decode.replicas
    return 2 * stored * workers <= ROOM * total_bytes()


def unstoppable(argv: Sequence[str]) -> str | None:
    """Run this Python to its end, for commands without a supervisor."""
    done = subprocess.run([sys.executable, *argv], stdout=subprocess.PIPE, text=True, env=os.environ, check=False)
    return None if done.returncode else done.stdout
