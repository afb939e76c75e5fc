"""The checks of `baton doctor` for a plan with GPUs: driver, compute capability, links between GPUs, NCCL, memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from baton.cli.setup.findings import BAD, OK, WARN, Finding
from baton.cluster.gpus import ON_THIS_HOST, check_gpus, first_gpu, gpu_pools, most_workers, visible_gpus
from baton.engine.kernels.gpu.driver import driver_version
from baton.engine.kernels.select import OLDEST_GPU
from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.config import ClusterConfig

# Oldest drivers: any of a CUDA release family, and that of a toolkit (tables 2 and 3 of NVIDIA's CUDA release notes).
OF_FAMILY = {"12": 525, "13": 580}
OF_TOOLKIT = {"12.6": 560, "12.8": 570, "12.9": 575}


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """The GPUs of this host. `count` GPUs are visible; the tuples are empty if torch cannot open them."""

    cuda: str | None = None  # CUDA release that torch was built for
    count: int = 0
    driver: str | None = None
    names: tuple[str, ...] = ()
    capabilities: tuple[tuple[int, int], ...] = ()
    peers: frozenset[tuple[int, int]] = frozenset()  # (i, j) if GPU i can access memory of GPU j
    nccl: tuple[int | str, ...] | None = None
    locked_bytes: int = resource.RLIM_INFINITY


def gpu_facts() -> GpuFacts:
    """Ask torch, NVML and the kernel. Opens CUDA in this process if there are GPUs."""
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    nccl = torch.cuda.nccl.version() if has_nccl else None  # type: ignore[no-untyped-call]  # its gap
    count, usable = torch.cuda.device_count(), torch.cuda.is_available()
    every = range(count if usable else 0)
    pairs = ((one, other) for one in every for other in every if one != other)
    return GpuFacts(
        torch.version.cuda,
        count,
        driver_version(),
        tuple(torch.cuda.get_device_name(index) for index in every),
        tuple(torch.cuda.get_device_capability(index) for index in every),
        frozenset(pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)),
        nccl,
        resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    )


def gpu_findings(config: ClusterConfig, facts: GpuFacts) -> Iterator[Finding]:
    """Yield one line for a plan without GPUs, else one for each property of the GPUs of the plan."""
    gpus, names = visible_gpus(facts.count, os.environ), ", ".join(sorted(set(facts.names))) or "torch opens none"
    here = f"{facts.count} here ({names})" if facts.count else "none here"
    if not gpu_pools(config, facts.count):
        yield Finding("gpu", OK, f"none in the plan, {here}")
        return
    if not facts.count and config.ray.address not in ON_THIS_HOST:
        yield Finding("gpu", WARN, f"{here}; the plan uses GPUs of Ray nodes", "run baton doctor on these nodes")
        return
    yield _plan(config, facts, gpus, here)
    yield _driver(facts)
    planned = [index for index in planned_gpus(config, gpus) if index < len(facts.names)]
    if planned:
        yield _capability(facts, planned)
        yield _peers(facts, planned)
    yield _nccl(config, facts)
    yield _locked_memory(facts.locked_bytes)


def planned_gpus(config: ClusterConfig, gpus: Sequence[str]) -> list[int]:
    """Return the indexes of the GPUs that the planned workers may use: for `device: cuda` the first ones, or with Ray
    any.
    """
    found, unnamed = set[int](), 0
    for pool in gpu_pools(config, len(gpus)).values():
        first, size = first_gpu(pool), most_workers(pool) * pool.tensor_parallel
        begin = unnamed if first is None else first
        unnamed += size if first is None else 0
        found |= set(range(begin, begin + size))
    return list(range(len(gpus))) if unnamed and config.ray.address != "none" else sorted(found)


def _plan(config: ClusterConfig, facts: GpuFacts, gpus: Sequence[str], here: str) -> Finding:
    what = "NVIDIA's driver" if facts.cuda else "torch with CUDA"
    remedy = f"install {what}, or set prefill.device and decode.device to cpu" if not facts.names else ""
    try:
        check_gpus(config, gpus)
    except ConfigError as error:
        return Finding("gpu", BAD, str(error), remedy)
    return Finding("gpu", OK if facts.names else BAD, here, remedy)


def _driver(facts: GpuFacts) -> Finding:
    if facts.cuda is None:
        return Finding("driver", OK, f"{facts.driver or 'none'}; this torch has no CUDA and needs none")
    family = facts.cuda.partition(".")[0]
    least = OF_FAMILY.get(family, max(OF_FAMILY.values()))
    best = OF_TOOLKIT.get(facts.cuda, least)
    found = f"{facts.driver or 'none'}; torch for CUDA {facts.cuda} needs {best} or newer"
    major = int(facts.driver.partition(".")[0]) if facts.driver else -1
    if major < least:
        return Finding("driver", BAD, found, f"install NVIDIA's driver {best}, or torch for an older CUDA")
    if major < best:
        text = f"{found} (from {least} on in CUDA's minor version compatibility)"
        return Finding("driver", WARN, text, f"install NVIDIA's driver {best}")
    return Finding("driver", OK, found)


def _capability(facts: GpuFacts, planned: Sequence[int]) -> Finding:
    found = {index: facts.capabilities[index] for index in planned}
    text = ", ".join(sorted({f"{major}.{minor}" for major, minor in found.values()}))
    old = [str(index) for index, capability in found.items() if capability < OLDEST_GPU]
    if old:
        text = f"{text}; below {OLDEST_GPU[0]}.{OLDEST_GPU[1]}: GPU {', '.join(old)}"
        return Finding("compute capability", WARN, text, "use newer GPUs; without Triton kernels, plain torch computes")
    return Finding("compute capability", OK, text)


def _peers(facts: GpuFacts, planned: Sequence[int]) -> Finding:
    if len(planned) == 1:
        return Finding("peer access", OK, "one GPU in the plan")
    rows = {one: [other for other in planned if (one, other) in facts.peers] for one in planned}
    if all(len(row) == len(planned) - 1 for row in rows.values()):
        return Finding("peer access", OK, f"between all {len(planned)} GPUs of the plan")
    matrix = "; ".join(f"{one} to {', '.join(map(str, row)) or 'none'}" for one, row in rows.items())
    remedy = "copies go through main memory; see nvidia-smi topo -p2p r, IOMMU and PCIe ACS, or use other GPUs"
    return Finding("peer access", WARN, f"GPU {matrix}", remedy)


def _nccl(config: ClusterConfig, facts: GpuFacts) -> Finding:
    if facts.nccl is not None:
        return Finding("nccl", OK, ".".join(map(str, facts.nccl)))
    ranks = any(pool.tensor_parallel > 1 for pool in gpu_pools(config, facts.count).values())
    needed = ranks or config.transfer.transport == "nccl"
    remedy = "install torch with CUDA, which contains it" if needed else "KV between GPUs is staged in main memory"
    return Finding("nccl", BAD if needed else WARN, "not in this torch", remedy)


def _locked_memory(limit: int) -> Finding:
    if limit == resource.RLIM_INFINITY:
        return Finding("locked memory", OK, "unlimited")
    remedy = "RDMA and UCX register memory: ulimit -l unlimited (limits.d: memlock; Docker: --ulimit memlock=-1)"
    return Finding("locked memory", WARN, f"{limit // 1024} KiB", remedy)
