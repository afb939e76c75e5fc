"""The GPUs of one host: which each worker process uses, and whether all planned workers fit.

A worker process sees only its own `tensor_parallel` GPUs, by CUDA_VISIBLE_DEVICES, and calls them cuda:0 and up.
Workers with `device: cuda` or `auto` share none. Worker i of a pool with `device: cuda:N` uses `tensor_parallel` GPUs
from N + i x tensor_parallel on; pools that name the same GPUs share them. A Ray of many hosts assigns GPUs itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence

from baton.config import ClusterConfig
from baton.config.schema import PoolConfig
from baton.core import Role
from baton.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
ON_THIS_HOST = ("local", "none")  # values of ray.address


def visible_gpus(count: int, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs as entries of CUDA_VISIBLE_DEVICES, in CUDA's order. `count` is the number that torch can use. It
    is 1 for any number of MIG instances, because CUDA opens only one of them in a process.
    """
    listed = environ.get(VISIBLE)
    if listed is None:
        return tuple(map(str, range(count)))
    entries = [entry.strip() for entry in listed.split(",")]
    mig = [entry for entry in entries if entry.startswith("MIG-")]
    return tuple(mig if mig and count else entries[:count])


def uses_gpus(config: ClusterConfig, pool: PoolConfig, gpus: int) -> bool:
    """Return whether the pool's workers compute on GPUs, where `gpus` exist. The oracle computes on the CPU."""
    here = gpus > 0 and config.model.path != "oracle"
    return pool.replicas > 0 and (pool.device.startswith("cuda") or (pool.device == "auto" and here))


def gpu_pools(config: ClusterConfig, gpus: int) -> dict[Role, PoolConfig]:
    """Return the pools whose workers compute on GPUs, where `gpus` exist."""
    pools = {Role.PREFILL: config.prefill, Role.DECODE: config.decode}
    return {role: pool for role, pool in pools.items() if uses_gpus(config, pool, gpus)}


def first_gpu(pool: PoolConfig) -> int | None:
    """Return N of `device: cuda:N`, else None."""
    return int(pool.device[5:]) if pool.device.startswith("cuda:") else None


def most_workers(pool: PoolConfig) -> int:
    """Return the largest number of workers that the pool may have."""
    return pool.autoscale.max if pool.autoscale else pool.replicas


def check_gpus(config: ClusterConfig, gpus: Sequence[str]) -> None:
    """Raise ConfigError if the workers of this host do not fit its `gpus`. On other hosts only `cuda:N` is rejected."""
    pools = gpu_pools(config, len(gpus))
    named = {role: first for role, pool in pools.items() if (first := first_gpu(pool)) is not None}
    devices = " and ".join(f"{role.value}.device: {pool.device}" for role, pool in pools.items())
    if config.ray.address not in ON_THIS_HOST:
        if named:
            text = f"Ray at ray.address {config.ray.address!r} chooses the GPUs; must be cuda, auto or cpu"
            raise ConfigError(f"{devices}: {text}")
        return
    if named and len(named) < len(pools):
        raise ConfigError(f"{devices}: must be cuda:N in both pools, or cuda or auto in both; only cuda:N shares GPUs")
    for role, first in named.items():
        _check_range(role, pools[role], first, len(gpus))
    needed = sum(most_workers(pool) * pool.tensor_parallel for pool in pools.values())
    if not named and needed > len(gpus):
        workers = " and ".join(_workers(role, pool) for role, pool in pools.items())
        text = f"{workers} need {needed} GPUs, and this host has {len(gpus)} that torch can use"
        raise ConfigError(f"{devices}: {text}; lower these numbers, write cuda:N in both pools to share GPUs, or cpu")


def _check_range(role: Role, pool: PoolConfig, first: int, count: int) -> None:
    last = first + most_workers(pool) * pool.tensor_parallel - 1
    if last >= count:
        wanted = f"GPU {first}" if first == last else f"the GPUs {first} to {last}"
        text = f"{_workers(role, pool)} need {wanted}, and this host has {count} that torch can use"
        raise ConfigError(f"{role.value}.device: {pool.device}: {text}; lower these numbers or N, or write cpu")


def _workers(role: Role, pool: PoolConfig) -> str:
    key = "autoscale.max" if pool.autoscale else "replicas"
    return f"{role.value}.{key} {most_workers(pool)} x {role.value}.tensor_parallel {pool.tensor_parallel}"


def with_devices(config: ClusterConfig, gpus: Sequence[str]) -> ClusterConfig:
    """Return the config for worker processes, which see only their own GPUs: `cuda:N` and `auto` become cuda or cpu."""
    if config.ray.address not in ON_THIS_HOST:
        return config
    pools = gpu_pools(config, len(gpus))
    prefill, decode = ("cuda" if role in pools else "cpu" for role in (Role.PREFILL, Role.DECODE))
    return _with(config, prefill, decode)


def _with(config: ClusterConfig, prefill: str, decode: str) -> ClusterConfig:
    pools = {
        "prefill": config.prefill.model_copy(update={"device": prefill}),
        "decode": config.decode.model_copy(update={"device": decode}),
    }
    return config.model_copy(update=pools)


def narrow(config: ClusterConfig, role: Role, environ: MutableMapping[str, str]) -> ClusterConfig:
    """Hide all GPUs of this process but those of a single worker with `device: cuda:N`, and return the config with
    device cuda. Call it before CUDA starts. Raises ConfigError if CUDA_VISIBLE_DEVICES has too few entries.
    """
    pool = config.prefill if role is Role.PREFILL else config.decode
    if (first := first_gpu(pool)) is None:
        return config
    end = first + pool.tensor_parallel
    gpus = visible_gpus(end, environ)
    _check_range(role, pool.model_copy(update={"replicas": 1, "autoscale": None}), first, len(gpus))
    environ[VISIBLE] = ",".join(gpus[first:end])
    prefill, decode = (one.device.partition(":")[0] for one in (config.prefill, config.decode))
    return _with(config, prefill, decode)


class GpuAssignment:
    """Assigns the GPUs of this host to workers. All calls come from one thread."""

    def __init__(self, config: ClusterConfig, gpus: Sequence[str]) -> None:
        self._gpus = tuple(gpus)
        self._pools = gpu_pools(config, len(gpus))
        self._taken: dict[str, tuple[Role, tuple[str, ...]]] = {}

    def is_named(self, role: Role) -> bool:
        """Return whether the pool has `device: cuda:N`."""
        return role in self._pools and first_gpu(self._pools[role]) is not None

    def take(self, worker_id: str, role: Role) -> tuple[str, ...] | None:
        """Return the GPUs of a new worker: none for a CPU, and None while too few are free."""
        if role not in self._pools:
            return ()
        pool = self._pools[role]
        found = self._of_range(role, pool) if self.is_named(role) else self._free()[: pool.tensor_parallel]
        if len(found) < pool.tensor_parallel:
            return None
        self._taken[worker_id] = role, found
        return found

    def give_back(self, worker_id: str) -> None:
        """Free the GPUs of a worker whose process has ended."""
        self._taken.pop(worker_id, None)

    def _free(self) -> tuple[str, ...]:
        used = {gpu for _, gpus in self._taken.values() for gpu in gpus}
        return tuple(gpu for gpu in self._gpus if gpu not in used)

    def _of_range(self, role: Role, pool: PoolConfig) -> tuple[str, ...]:
        """Return the GPUs of the pool's range that the fewest of its workers use, or of these the fewest of all."""
        first, size = first_gpu(pool) or 0, pool.tensor_parallel
        starts = range(first, first + most_workers(pool) * size, size)
        groups = [self._gpus[start : start + size] for start in starts]
        used = Counter(gpus for taker, gpus in self._taken.values() if taker is role)
        shared = Counter(gpus for _, gpus in self._taken.values())  # also by workers that have changed their role
        return min(groups, key=lambda group: (used[group], shared[group]))
