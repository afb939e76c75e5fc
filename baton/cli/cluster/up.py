"""Commands that start and stop processes: `baton up | down | pull | demo` for a cluster, and for one role
`baton prefill-worker | decode-worker | router | gateway`, by hand or from `baton up`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import LOCAL, ClusterName, ConfigFile, Json, Sets
from baton.core import Role

Detach = Annotated[bool, typer.Option("--detach", "-d", help="return when the cluster is ready")]
STAY = "serve the live page with sample requests until Ctrl-C (default: on a terminal)"
Stay = Annotated[bool | None, typer.Option("--stay/--no-stay", help=STAY)]
Index = Annotated[int, typer.Option("--index", min=0, help="the worker's number within its pool")]
WorkerId = Annotated[str | None, typer.Option("--id", help="the worker's id in any role (default: <role>-<index>)")]
RouterIndex = Annotated[int, typer.Option("--index", min=0, help="the router's number, of router.replicas")]
Upstream = Annotated[str | None, typer.Option("--target", help="a router's host:port (default: router.grpc)")]
Log = Annotated[Path | None, typer.Option("--log", help="append the output to this file")]


def up(config: ConfigFile = LOCAL, sets: Sets = None, detach: Detach = False, as_json: Json = False) -> None:
    """Start the cluster of a file. One Ctrl-C drains it, two stop it."""
    from baton.cluster.signals import stop_on_signals

    stop = stop_on_signals()  # before the slow imports, so that signals count during them
    from baton.cli.cluster import launch

    launch.up(config, sets or [], stop, detach=detach, as_json=as_json)


def pull(model: str) -> None:
    """Download a model, such as hf:Qwen/Qwen3-0.6B, to the local cache, and print its folder."""
    from baton.cli.cluster import launch

    launch.pull(model)


def down(name: ClusterName = None) -> None:
    """Stop a running cluster and wait until all of its processes are gone."""
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
