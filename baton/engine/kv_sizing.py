"""Number of KV blocks and longest sequence, from `kv_memory` and `max_model_len` of the cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import psutil
import torch

from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.core import KVLayout

CPU_SHARE, CPU_CAP_BYTES = 0.2, 4 << 30  # of available memory, per worker, because several share a machine
GPU_SHARE = 0.9  # after activations (`claim_activations`); the rest is for graphs, sampling, transfers
CGROUP = Path("/sys/fs/cgroup")


class Sizing(NamedTuple):
    """Sizes that the engine is built with."""

    total_blocks: int
    max_model_len: int


def size_kv(
    layout: KVLayout,
    *,
    kv_memory: int | Literal["auto"],
    max_model_len: int | Literal["auto"],
    model_max_len: int,
    device: torch.device,
) -> Sizing:
    """Return the blocks in `kv_memory` bytes, and the longest sequence that fits alone, up to `model_max_len`. Raises
    ConfigError, with a remedy, if a sequence of `max_model_len` or `kv_memory` itself does not fit.
    """
    budget, most = auto_kv_bytes(device) if kv_memory == "auto" else kv_memory, _total_bytes(device)
    if budget > most:
        raise ConfigError(f"kv_memory: {budget} bytes, but {device} has {most}; set fewer, or auto")
    blocks = budget // layout.block_bytes
    if blocks < 1:
        raise ConfigError(f"kv_memory: {budget} bytes are less than one block of {layout.block_bytes} bytes")
    capacity = blocks * layout.block_size
    if max_model_len == "auto":
        return Sizing(blocks, min(model_max_len, capacity))
    if not 2 <= max_model_len <= model_max_len:
        raise ConfigError(
            f"model.max_model_len: must be between 2 and the model's {model_max_len}, got {max_model_len}"
        )
    if max_model_len > capacity:
        need = layout.blocks_for(max_model_len) * layout.block_bytes
        raise ConfigError(
            f"kv_memory: {budget} bytes hold {capacity} tokens, fewer than model.max_model_len {max_model_len}; "
            f"set at least {need} bytes, or lower model.max_model_len"
        )
    return Sizing(blocks, max_model_len)


def auto_kv_bytes(device: torch.device) -> int:
    """Return the share of the free memory of `device` that one worker uses for KV, in bytes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * GPU_SHARE)
    return min(int(available_bytes() * CPU_SHARE), CPU_CAP_BYTES)


def _total_bytes(device: torch.device) -> int:
    """Return all memory in bytes, used or not, because a container counts reclaimable file cache as used."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    machine, limit = int(psutil.virtual_memory().total), CGROUP / "memory.max"
    text = limit.read_text().strip() if limit.exists() else ""
    return min(machine, int(text)) if text.isdigit() else machine


def available_bytes(cgroup: Path = CGROUP) -> int:
    """Return the available main memory in bytes: the machine's, or the container's if that is less."""
    machine = int(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text()) - _file_cache(cgroup)
    except (OSError, ValueError):
        return machine
    return min(machine, max(0, int(limit) - used)) if limit.isdigit() else machine


def _file_cache(cgroup: Path) -> int:
    """Return the bytes of reclaimable file cache, which a container counts as used."""
    stat = cgroup / "memory.stat"
    lines = (line.split() for line in (stat.read_text() if stat.exists() else "").splitlines())
    return sum(int(value) for name, value in lines if name in {"inactive_file", "active_file"})
