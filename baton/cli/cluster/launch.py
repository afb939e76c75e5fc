"""Start and stop a cluster, and download its model first: the work of `baton up`, `down` and `pull`."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import PIPE

import psutil
import typer

from baton.cli.cluster.dtype import with_dtype
from baton.cli.cluster.model_check import check_architecture, check_model
from baton.cli.cluster.phases import shown_phases
from baton.cli.cluster.ports import check_ports
from baton.cli.cluster.serve import role_factories
from baton.cli.cluster.size_check import check_sizes
from baton.cli.exit_codes import exit_code
from baton.cli.target import TOKEN_VARIABLE, check_secrets, find_cluster
from baton.cluster.backend_process import (
    PARENT,
    POLL_S,
    READY_FD,
    START_TIMEOUT_S,
    Child,
    ProcessPlacement,
    ProcessSpec,
    die_with_parent,
    report_ready,
)
from baton.cluster.backend_ray import LOCAL, RayPlacement, start_local
from baton.cluster.controller import LocalControl
from baton.cluster.controller_ray import RemoteControl
from baton.cluster.gpus import ON_THIS_HOST, GpuAssignment, check_gpus, gpu_pools, visible_gpus, with_devices
from baton.cluster.interfaces import Control
from baton.cluster.launcher import Supervisor
from baton.cluster.signals import Stop
from baton.cluster.state_dir import ClusterState, StateFolder, running_clusters, writing
from baton.config import ClusterConfig, RouterConfig, load_config, located, with_places
from baton.config.loading import ENV_PREFIX
from baton.config.values import HUB_PREFIX
from baton.core import Role, sizes_text
from baton.engine.kernels.cpu.compiler import cpu_level
from baton.errors import BatonError, Cancelled, CheckpointError, ConfigError
from baton.logs import configure_logging
from baton.model_hub import downloaded, hub_files, model_folder, other_form, pinned
from baton.network import raise_open_files

COMMAND = ("-m", "baton", "pull")
DOWN_S = 60.0  # for the rest of an orderly stop: routers, workers, Ray and Redis may each need their limit
LOOK_S = 0.1  # interval of checks of ending processes
SUPERVISOR = "supervisor"


def pull(model: str) -> None:
    """Download missing files of a model from the Hub, and print its folder. Raises ConfigError, CheckpointError."""
    die_with_parent()
    if not model.startswith(HUB_PREFIX):
        raise ConfigError(f"{model}: must be a Hub name such as hf:Qwen/Qwen3-0.6B")
    from baton.engine.models.fallback.choice import check_served  # slow to import

    with suppress(CheckpointError):  # then the cached files decide
        if form := other_form(hub_files(model), model):
            raise ConfigError(f"model.path: {model}: {form}")
    try:
        check_served(model_folder(model, weights=False))
    except CheckpointError as error:
        raise CheckpointError(f"{model} cannot be served, so its weights are not downloaded: {error}") from None
    typer.echo(downloaded(model))


def fetched(config: ClusterConfig, stop: Stop) -> ClusterConfig:
    """Return the config with its Hub model downloaded and pinned to a commit. Raises Cancelled, typer.Exit."""
    path = config.model.path
    if not path.startswith(HUB_PREFIX):
        return config
    code, output = _output((*COMMAND, path), stop)
    if code:
        raise typer.Exit(code)
    name = pinned(path, Path(output.strip()))
    return config.model_copy(update={"model": config.model.model_copy(update={"path": name})})


def _output(argv: Sequence[str], stop: Stop, *, quiet: bool = False) -> tuple[int, str]:
    """Run this Python with arguments; return its exit code and output. Raises Cancelled, which ends it. Its stderr is
    dropped if `quiet`.
    """
    # in a child process, because only a process can be stopped immediately
    env = os.environ | {PARENT: str(os.getpid())}
    command, errors = [sys.executable, *argv], subprocess.DEVNULL if quiet else None
    with subprocess.Popen(command, stdout=PIPE, stderr=errors, text=True, env=env, process_group=0) as process:
        try:
            while process.poll() is None:
                stop.check()
                stop.drain.wait(POLL_S)
        except BatonError:
            process.kill()
            raise
        output = process.stdout.read() if process.stdout else ""
    return process.returncode, output


Announce = Callable[[ClusterState, ClusterConfig], None]


def up(file: Path, sets: Sequence[str], stop: Stop, *, detach: bool, announce: Announce) -> None:
    """Start a cluster and return when it has ended, or with `detach` when it is ready. Calls `announce` then."""
    raise_open_files()  # child processes inherit it
    config = load_config(file, sets, os.environ)
    with located(file, sets, os.environ):
        _up(config, file, sets, stop, announce, detach=detach)


def _up(
    config: ClusterConfig, file: Path, sets: Sequence[str], stop: Stop, announce: Announce, *, detach: bool
) -> None:
    check_secrets(config)
    cpu_level()  # reject a wrong level now, because each worker would reject it later
    gpus = host_gpus(config)
    check_gpus(config, gpus)  # before the model is downloaded
    check_model(config, gpus)
    check_ports(config)
    if READY_FD not in os.environ:  # else the parent did
        check_architecture(config, partial(_output, stop=stop, quiet=True))
    if detach:
        _detach(config, gpus, file, sets, stop, announce)
        return
    copy = StateFolder(config.name).logs / f"{SUPERVISOR}.log"
    configure_logging("warning", "auto", SUPERVISOR, copy)
    folder = StateFolder(config.name)
    folder.acquire()  # before the download, which a second `baton up` must not repeat
    try:
        _run(config, gpus, folder, stop, announce)
    finally:
        folder.release()


def _run(config: ClusterConfig, gpus: Sequence[str], folder: StateFolder, stop: Stop, announce: Announce) -> None:
    typer.echo(f"starting cluster {config.name!r} ...", err=True)
    config = prepared(config, gpus, stop)  # its output must not meet the phases

    workers = config.prefill.replicas + config.decode.replicas
    detached = READY_FD in os.environ  # then the parent shows the phases
    with shown_phases(folder.logs, workers, shows=not detached) as shown:

        def ready(state: ClusterState) -> None:
            shown()
            report_ready({"name": state.name})
            announce(state, config)

        run_cluster(config, stop, ready, folder)


def prepared(config: ClusterConfig, gpus: Sequence[str], stop: Stop) -> ClusterConfig:
    """Return the config with its model downloaded and checked, and its dtype chosen. A second call changes nothing.
    Raises Cancelled, ConfigError, CheckpointError, typer.Exit.
    """
    config = fetched(config, stop)
    check_model(config, gpus)
    check_sizes(config, set(gpu_pools(config, len(gpus))))
    return with_dtype(config, gpus, lambda argv: _output(argv, stop)[1])


def run_cluster(config: ClusterConfig, stop: Stop, ready: Callable[[ClusterState], None], folder: StateFolder) -> None:
    """Run a cluster in this thread until stopped."""
    gpus = host_gpus(config)
    check_gpus(config, gpus)
    config = prepared(config, gpus, stop)
    command = [sys.executable, "-m", "baton", "router", "-c", str(folder.config)]
    control = make_control(config, folder, gpus, stop)
    Supervisor(with_devices(config, gpus), folder, control, command).run(stop, ready)


def host_gpus(config: ClusterConfig) -> tuple[str, ...]:
    """Return this host's GPUs, as entries of CUDA_VISIBLE_DEVICES, if the config may use them."""
    if config.ray.address not in ON_THIS_HOST or not gpu_pools(config, gpus=1):
        return ()  # without the slow import of torch
    import torch

    return visible_gpus(torch.cuda.device_count(), os.environ)


def make_control(config: ClusterConfig, folder: StateFolder, gpus: Sequence[str], stop: Stop) -> Control:
    """Return the `Control` of the workers: child processes for `ray.address: none`, otherwise Ray actors."""

    def worker_command(worker_id: str, role: Role) -> list[str]:
        return [sys.executable, "-m", "baton", f"{role.value}-worker", "-c", str(folder.config), "--id", worker_id]

    if config.ray.address == "none":
        return LocalControl(config, ProcessPlacement(worker_command, folder.logs, GpuAssignment(config, gpus)))
    if config.ray.address != LOCAL:
        command = [sys.executable, "-m", "baton", "controller", "-c", str(folder.config)]
        return RemoteControl(config, command, folder.logs)
    from baton.worker.process import WorkerActor

    start = partial(start_local, folder.scratch, config.name, len(gpus), stop.check)
    given, named = partial(load_config, folder.config), GpuAssignment(config, gpus)
    return LocalControl(config, RayPlacement(given, WorkerActor, role_factories(), start, folder.logs, named=named))


def announce_json(state: ClusterState, _: ClusterConfig) -> None:
    """Print the cluster's addresses and process ids as JSON."""
    addresses = {"name": state.name, "grpc": state.grpc, "admin": state.admin, "metrics": state.metrics}
    addresses |= {"http": state.http} if state.http else {}
    typer.echo(json.dumps(addresses | {"pids": {name: p.pid for name, p in state.processes.items()}}))


def announce(state: ClusterState, config: ClusterConfig) -> None:
    """Print the cluster's addresses, and how to use it."""
    typer.echo(f"cluster {state.name!r} is ready: {sizes_text(config.prefill.replicas, config.decode.replicas)}")
    typer.echo(f"  gRPC     {state.grpc}")
    typer.echo(f"  admin    {state.admin}")
    typer.echo(f"  metrics  http://{state.metrics}/metrics")
    security = config.security
    http = f"{'https' if security.tls else 'http'}://{state.http}/v1"
    typer.echo(f"  HTTP     {http}\n" if state.http else "")
    typer.echo(f"  curl -s http://{state.metrics}/metrics | grep baton_")
    if state.http:
        body = '{"prompt": "The color of dog", "max_tokens": 8, "temperature": 0}'
        secured = curl_options(config, TOKEN_VARIABLE)
        typer.echo(f"  curl -s {http}/completions{secured} -H 'content-type: application/json' -d '{body}'")
    typer.echo(f'  baton generate "The color of dog" --name {state.name} --show timings,tokens\n')
    options = f', token=os.environ["{TOKEN_VARIABLE}"]' * (security.tokens is not None)
    options += f', tls="{security.tls.ca}"' if security.tls else ""
    typer.echo(f'  from baton import Client\n  with Client("{state.grpc}"{options}) as client:')
    typer.echo('      print(client.generate("The color of dog", max_tokens=8, temperature=0).text)\n')


def curl_options(config: ClusterConfig, variable: str) -> str:
    """Return the options of `curl` for the certificates and tokens of HTTP; `variable` has the token."""
    tls = f" --cacert {shlex.quote(str(config.security.tls.ca))}" if config.security.tls else ""
    return tls + f' -H "authorization: Bearer ${variable}"' * (config.security.tokens is not None)


def _detach(
    config: ClusterConfig, gpus: Sequence[str], file: Path, sets: Sequence[str], stop: Stop, announce: Announce
) -> None:
    """Start `baton up` in its own session, and wait until it is ready or has failed."""
    folder = StateFolder(config.name)
    folder.acquire()  # raises early if the folder is unusable or taken; the child acquires it again
    try:
        folder.write_private(folder.config, config.model_dump_json())  # likewise if the disk is full
        output = folder.path / "up.out"
        with writing(output):
            output.unlink(missing_ok=True)
        here = prepared(config, gpus, stop).model.path  # now, because progress is visible here and nothing times out
    finally:
        folder.release()
    argv = [sys.executable, "-m", "baton", "up", "-c", str(file)]
    argv += [word for item in as_options(sets) for word in ("--set", item)]
    env = as_environment([*sets, *[f"model.path={here}"] * (here != config.model.path)], os.environ)
    child = Child(ProcessSpec("up", argv, output, env, ready_timeout_s=2 * START_TIMEOUT_S, new_session=True))
    child.start()
    try:
        with shown_phases(folder.logs, config.prefill.replicas + config.decode.replicas) as shown:
            child.wait_ready(stop)
            shown()
    except BatonError as error:
        child.terminate()
        child.wait(DOWN_S)
        if isinstance(error, Cancelled):
            raise  # the child's output would repeat it
        printed = with_places(_printed(output), file, sets, os.environ)
        typer.echo(printed or f"baton: {type(error).__name__}: {error}", err=True)
        raise typer.Exit(exit_code(error)) from None
    state = folder.read_state()
    if state is not None:
        announce(state, config)


def _printed(output: Path) -> str:
    """Return the output of a detached process, which is empty if the disk was full."""
    try:
        return output.read_text(encoding="utf-8", errors="replace").rstrip()
    except OSError:
        return ""


def as_environment(sets: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return `sets` and config variables, without `as_options`, as an environment: all users see command lines."""
    given = {name: value for name, value in environ.items() if name.startswith(ENV_PREFIX)}
    for item in filter(_is_config_key, sets):
        key, _, value = item.partition("=")
        name = ENV_PREFIX + key.strip().upper().replace(".", "__")
        given = {old: text for old, text in given.items() if not old.startswith(f"{name}__")}  # the section replaces it
        given[name] = value
    return given


def as_options(sets: Sequence[str]) -> list[str]:
    """Return items that no variable can express, because the names are not config keys: tenants, for example."""
    return [item for item in sets if not _is_config_key(item)]


def _is_config_key(item: str) -> bool:
    key = item.partition("=")[0].strip()
    return key == key.lower() and "__" not in key


def down(name: str | None) -> None:
    """Stop a cluster, even one that is still starting, and return when none of its processes is left. A cluster that
    does not run is down. Raises NoWorker if several run and none is named.
    """
    running = [state.name for state in running_clusters()]
    if name not in {None, *running} or not running:
        running_clusters(strict=True)  # one of another user is an error
        typer.echo(f"cluster {name!r} is not running" if name else "no cluster is running")
        return
    state = find_cluster(name, starting=True)
    supervisor = state.supervisor.process()
    left = [supervisor] if supervisor else []
    left += [process for identity in state.processes.values() if (process := identity.process())]
    folder = StateFolder(state.name)
    drain_s = RouterConfig().drain_s if folder.config.exists() else 0.0
    with suppress(ConfigError):  # removed, or no longer valid: an expired certificate, or another version of Baton
        drain_s = load_config(folder.config).router.drain_s
    if supervisor is not None:
        with suppress(psutil.NoSuchProcess):
            supervisor.terminate()
    for process in (alive := wait_ended(left, drain_s + DOWN_S)):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    wait_ended(alive, 5.0)
    with suppress(ConfigError):  # the next cluster has acquired it
        folder.acquire()  # removes the files of a killed supervisor
        folder.release()
    typer.echo(f"cluster {state.name!r} is down")


def wait_ended(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait at most `timeout_s` until the processes have ended, and return those still running. A zombie has ended."""
    deadline = time.monotonic() + timeout_s
    while processes and time.monotonic() < deadline:
        _, alive = psutil.wait_procs(processes, timeout=LOOK_S)
        processes = [process for process in alive if not _is_zombie(process)]
    return processes


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
