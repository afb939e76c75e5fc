"""The dtype of a bfloat16 checkpoint on CPUs for `model.dtype: auto`: bfloat16, unless float32 is clearly faster here.

    python -m baton.worker.dtype_choice MODEL_FOLDER THREADS    # 0: torch's number; prints the dtype

Measured once for each processor, level, thread count, torch and model shape, and stored with the profiles.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path

import structlog
import torch

from baton.engine.kernels.base import Linear
from baton.engine.kernels.cpu.compiler import SOURCES, level_here, machine
from baton.engine.kernels.cpu.tuning import alternate
from baton.engine.kernels.select import choose_kernels
from baton.engine.kv_cache import DTYPES
from baton.engine.models.config import ModelConfig, read_config
from baton.engine.models.fallback.choice import chosen_backend
from baton.hashing import fingerprint
from baton.home import baton_home

log = structlog.get_logger(__name__)
KINDS = ("bfloat16", "float32")
Seconds = Mapping[str, float]  # by dtype: the weighted sum of all products
# Products by rows: 64 tokens of one sequence, 32 steps of eight sequences, a prompt of 512 tokens in two panels.
WEIGHTS = {1: 64, 8: 32, 256: 2}
CLEARLY = 1.10  # float32 doubles weights and KV, so a smaller gain is not worth it
COLD_BYTES, MOST_COPIES = 64 << 20, 16  # copies of a weight that alternate, so that it is read from memory


def faster(seconds: Seconds) -> str:
    """Return bfloat16, unless float32 is more than 10 % faster."""
    return "float32" if seconds["float32"] * CLEARLY < seconds["bfloat16"] else "bfloat16"


def chosen(path: Path, measure: Callable[[], Seconds]) -> str:
    """Return the dtype kept in a file, or measure and keep it. A damaged file is measured again."""
    try:
        kept = {kind: float(json.loads(path.read_text())[kind]) for kind in KINDS}
        if min(kept.values()) > 0:
            return faster(kept)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("profile_unreadable", path=str(path), error=str(error))
    print("measuring bfloat16 and float32, once for this model and machine ...", file=sys.stderr)  # noqa: T201
    seconds = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.part")  # another process may write it, too
        scratch.write_text(json.dumps(dict(seconds), indent=1))
        scratch.replace(path)
    except OSError as error:  # a full disk: the next start measures again
        log.warning("profile_unwritable", path=str(path), error=str(error))
    return faster(seconds)


def products(config: ModelConfig) -> list[tuple[int, int]]:
    """Return the largest linear shapes [width, K] of a dense model: feed-forward, attention, head."""
    hidden, attention = config.hidden_size, (config.heads + 2 * config.kv_heads) * config.head_dim
    inner = config.intermediate_size
    return [(2 * inner, hidden), (hidden, inner), (attention, hidden), (config.vocab_size, hidden)]


def path_of(config: ModelConfig, threads: int) -> Path:
    """Return the file of the measurement, whose name depends on all that it depends on."""
    here, sources = machine(), [file.read_text() for file in sorted(SOURCES.glob("*.[ch]"))]
    key = fingerprint((here.model, *sorted(here.flags), version("torch"), *sources, repr(products(config))))
    return baton_home() / "profile" / f"{key}-{level_here()}-{threads}-dtype.json"


def measured(config: ModelConfig) -> Seconds:
    """Measure both dtypes in turns: the weighted sum over rows of the products of one layer and of the head."""
    kernels = {kind: choose_kernels(torch.device("cpu"), DTYPES[kind]) for kind in KINDS}
    layers = [config.layers] * 3 + [1]
    total = dict.fromkeys(KINDS, 0.0)
    for (width, k), times in zip(products(config), layers, strict=True):
        copies = max(1, min(MOST_COPIES, COLD_BYTES // (width * k * 4)))
        made = {
            kind: [kernels[kind].linear(torch.randn(width, k).to(DTYPES[kind])) for _ in range(copies)]
            for kind in KINDS
        }
        for rows, weight in WEIGHTS.items():
            seconds = alternate([partial(_run, made[kind], rows, k, DTYPES[kind]) for kind in KINDS])
            for kind, taken in zip(KINDS, seconds, strict=True):
                total[kind] += taken / copies * weight * times
    return total


def _run(layers: list[Linear], rows: int, k: int, dtype: torch.dtype) -> None:
    x, out = torch.ones(rows, k, dtype=dtype), torch.empty(rows, layers[0].width, dtype=dtype)
    for layer in layers:
        layer(x, out)


def main(folder: str, threads: str) -> None:
    """Print the dtype. Models with experts, with latent attention or in transformers have other products and keep
    bfloat16.
    """
    if int(threads):
        torch.set_num_threads(int(threads))
    if chosen_backend(Path(folder), "auto") != "native":
        print("bfloat16")  # noqa: T201
        return
    config = read_config(Path(folder))
    other = config.experts is not None or config.latent is not None
    used = torch.get_num_threads()
    print("bfloat16" if other else chosen(path_of(config, used), partial(measured, config)))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
