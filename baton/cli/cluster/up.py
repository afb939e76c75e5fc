"""Commands that start and stop a cluster, or run one part of it as a process, by hand or from `baton up`."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.cluster.vllm_options import reject_unknown
from baton.cli.importing import uncollected
from baton.cli.options import LOCAL, ClusterName, ConfigFile, Json, Sets
from baton.core import Role
from baton.errors import LedgerError

Detach = Annotated[bool, typer.Option("--detach", "-d", help="return when the cluster is ready")]
STAY = "serve the live page with sample requests until Ctrl-C (default: on a terminal)"
Stay = Annotated[bool | None, typer.Option("--stay/--no-stay", help=STAY)]
Index = Annotated[int, typer.Option("--index", min=0, help="the worker's number within its pool")]
WorkerId = Annotated[str | None, typer.Option("--id", help="the worker's id in any role (default: <role>-<index>)")]
RouterIndex = Annotated[int, typer.Option("--index", min=0, help="the router's number, of router.replicas")]
Upstream = Annotated[
    str | None,
    typer.Option("--target", help="a router's host:port, or several with commas (default: router.grpc)"),
]
Log = Annotated[Path | None, typer.Option("--log", help="append the output to this file")]
Bound = Annotated[bool, typer.Option("--bound", hidden=True, help="the created controller ends with this process")]
Other = Annotated[str | None, typer.Option("--model", hidden=True)]  # of other servers, for its message
Model = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="a folder, GGUF file or Hub name (default: the demo model)")
]
GRACE_S = 5.0  # for the workers of `baton controller --stop`


def up(
    config: ConfigFile = LOCAL, sets: Sets = None, detach: Detach = False, as_json: Json = False, model: Other = None
) -> None:
    """Start the cluster of a file. One Ctrl-C drains it, two stop it."""
    if model is not None:
        raise typer.BadParameter(f"a file sets the model; add --set model.path={model}, or run: baton serve {model}")
    from baton.cluster.signals import stop_on_signals

    stop = stop_on_signals()  # before the slow imports, so that signals count during them
    with uncollected():
        from baton.cli.cluster import launch

    launch.up(config, sets or [], stop, detach=detach, announce=launch.announce_json if as_json else launch.announce)


def serve(  # noqa: PLR0913, PLR0917  (the options of a command line)
    context: typer.Context,
    model: Model = None,
    prefill: Annotated[int | None, typer.Option("--prefill", help="prefill workers (default: 1)")] = None,
    decode: Annotated[int | None, typer.Option("--decode", help="decode workers (default: 1)")] = None,
    host: Annotated[str | None, typer.Option("--host", help="address of the HTTP API (default: 127.0.0.1)")] = None,
    port: Annotated[int | None, typer.Option("--port", min=0, max=65535, help="its port (default: 8000)")] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="BATON_API_KEY", help="for all requests; stored as a hash")
    ] = None,
    max_model_len: Annotated[str | None, typer.Option("--max-model-len", help="prompt and answer, or auto")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="of weights: auto, float32 or bfloat16")] = None,
    quantize: Annotated[str | None, typer.Option("--quantize", help="weights on CPUs in int8 or int4")] = None,
    device: Annotated[str | None, typer.Option("--device", help="of workers: auto, cpu, cuda or cuda:N")] = None,
    served_names: Annotated[
        list[str] | None, typer.Option("--served-model-name", help="model name for clients; repeat it for others")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="the cluster's name (default: serve)")] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="a cluster file under these options")] = None,
    sets: Sets = None,
    detach: Detach = False,
) -> None:
    """Serve a model: `baton serve FOLDER`, or `baton serve Qwen/Qwen3-0.6B --port 8000`. Ctrl-C stops it."""
    from baton.cluster.signals import stop_on_signals

    reject_unknown(context.args, [each for known in context.command.params for each in known.opts if each[0] == "-"])
    stop = stop_on_signals()
    with uncollected():
        from baton.cli.cluster.serve_model import ServeOptions
        from baton.cli.cluster.serve_model import serve as start

    keys = (
        ("--prefill", "prefill.replicas", prefill),
        ("--decode", "decode.replicas", decode),
        ("--max-model-len", "model.max_model_len", max_model_len),
        ("--dtype", "model.dtype", dtype),
        ("--quantize", "model.quantize", quantize),
        (
            "--served-model-name",
            "model.served_name",
            served_names[0] if served_names and len(served_names) == 1 else served_names or None,
        ),
        ("--device", "prefill.device", device),
        ("--device", "decode.device", device),
    )
    options = ServeOptions(model, config, tuple(sets or ()), name, host, port, api_key, keys)
    start(options, stop, detach=detach)


def pull(model: Annotated[str, typer.Argument(metavar="MODEL", help="hf:org/name or hf:org/name@revision")]) -> None:
    """Download a model, such as hf:Qwen/Qwen3-0.6B, to the local cache, and print its folder."""
    from baton.cli.cluster import launch

    launch.pull(model)


def down(name: ClusterName = None) -> None:
    """Stop a running cluster and wait until all of its processes are gone."""
    with uncollected():
        from baton.cli.cluster import launch

    launch.down(name)


def demo(config: ConfigFile = LOCAL, sets: Sets = None, stay: Stay = None) -> None:
    """Start a cluster on free ports, answer two prompts, and show the work of each worker and the live page."""
    from baton.cluster.signals import stop_on_signals

    stop = stop_on_signals()
    from baton.cli.cluster.demo import run_demo

    run_demo(config, sets or [], stop, stay=sys.stdout.isatty() if stay is None else stay)


def prefill_worker(
    config: ConfigFile = LOCAL, index: Index = 0, sets: Sets = None, log: Log = None, worker_id: WorkerId = None
) -> None:
    """Run a prefill worker as a plain process. The cluster's controller may change its role."""
    from baton.cli.cluster import serve

    serve.run_role(Role.PREFILL, config, sets or [], worker_id or f"prefill-{index}", log)


def decode_worker(
    config: ConfigFile = LOCAL, index: Index = 0, sets: Sets = None, log: Log = None, worker_id: WorkerId = None
) -> None:
    """Run a decode worker as a plain process. The cluster's controller may change its role."""
    from baton.cli.cluster import serve

    serve.run_role(Role.DECODE, config, sets or [], worker_id or f"decode-{index}", log)


def router(config: ConfigFile = LOCAL, index: RouterIndex = 0, sets: Sets = None, log: Log = None) -> None:
    """Run a router as a plain process."""
    from baton.cli.cluster import serve

    serve.run_router(config, sets or [], log, index)


def gateway(config: ConfigFile = LOCAL, target: Upstream = None, sets: Sets = None, log: Log = None) -> None:
    """Run only OpenAI's HTTP API, at router.http, in front of a router."""
    from baton.cli.cluster import serve

    serve.run_gateway(config, sets or [], target, log)


def controller(
    config: ConfigFile,
    sets: Sets = None,
    wait: Annotated[float, typer.Option("--wait", min=0, help="seconds to wait for the Ray cluster")] = 300,
    stop: Annotated[bool, typer.Option("--stop", help="end the workers and the controller")] = False,
    follow: Annotated[bool, typer.Option("--follow", hidden=True, help="run until a stop signal or its loss")] = False,
    bound: Bound = False,
    attach: Annotated[bool, typer.Option("--attach", hidden=True, help="the cluster already serves")] = False,
) -> None:
    """Start a controller in the Ray cluster at ray.address. It runs the workers of a file; they are not waited for."""
    from baton.cluster.signals import stop_on_signals

    stopped = stop_on_signals()
    from baton.cluster import controller_ray
    from baton.cluster.backend_process import die_with_parent, report_ready
    from baton.config import load_config
    from baton.logs import configure_logging

    die_with_parent()
    cluster = load_config(config, sets or [], os.environ)
    configure_logging(cluster.log.level, cluster.log.format, "controller")
    ray = controller_ray.join(cluster, wait, stopped)
    try:
        if stop:
            controller_ray.end(ray, cluster, GRACE_S)
            typer.echo(f"the workers of cluster {cluster.name!r} have ended")
            return
        from baton.cli.cluster.serve import role_factories  # these two import the engine
        from baton.cluster.follower_lease import FollowerLease
        from baton.worker.process import WorkerActor

        parts = controller_ray.Parts(WorkerActor, role_factories())
        lease = FollowerLease(cluster.redis.url, cluster.name, pause=stopped.drain.wait)
        if not follow:
            with suppress(LedgerError):  # the controller waits for Redis itself
                lease.check()
            controller_ray.ensure(ray, cluster, parts, stopped, detached=not bound)
            typer.echo(f"the controller of cluster {cluster.name!r} is in the Ray cluster at {cluster.ray.address}")
            return
        with lease:
            there = controller_ray.ensure(ray, cluster, parts, stopped, detached=not bound, renew=lease.take)

            def ready(state: controller_ray.ControllerProgress) -> None:
                report_ready({"workers": state.workers, "pid": os.getpid()})

            controller_ray.follow(ray, there, stopped, ready, attach=attach, renew=lease.take)
    finally:
        ray.shutdown()
