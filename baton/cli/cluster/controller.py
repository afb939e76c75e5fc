"""`baton controller`: the controller in an existing Ray cluster, started by Ray's operator or by `baton up`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.options import ConfigFile, Sets

if TYPE_CHECKING:
    from baton.cluster.controller_ray import ControllerProgress

GRACE_S = 5.0

Bound = Annotated[bool, typer.Option("--bound", hidden=True, help="the created controller ends with this process")]


def controller(
    config: ConfigFile,
    sets: Sets = None,
    wait: Annotated[float, typer.Option("--wait", min=0, help="seconds to wait for the Ray cluster")] = 300,
    stop: Annotated[bool, typer.Option("--stop", help="end the workers and the controller")] = False,
    follow: Annotated[bool, typer.Option("--follow", hidden=True, help="run until a stop signal or its loss")] = False,
    bound: Bound = False,
) -> None:
    """Start a controller in the Ray cluster at ray.address. It runs the workers of a file; they are not waited for."""
    from baton.cluster.signals import stop_on_signals

    stopped = stop_on_signals()
    from baton.cli.cluster.serve import role_factories
    from baton.cluster import controller_ray
    from baton.cluster.backend_process import die_with_parent
    from baton.config import load_config
    from baton.logs import configure_logging
    from baton.worker.process import WorkerActor

    die_with_parent()
    cluster = load_config(config, sets or [], os.environ)
    configure_logging(cluster.log.level, cluster.log.format, "controller")
    ray = controller_ray.join(cluster, wait, stopped)
    try:
        if stop:
            controller_ray.end(ray, cluster, GRACE_S)
            typer.echo(f"the workers of cluster {cluster.name!r} have ended")
            return
        parts = controller_ray.Parts(WorkerActor, role_factories())
        there = controller_ray.ensure(ray, cluster, parts, stopped, detached=not bound)
        if follow:
            controller_ray.follow(ray, there, stopped, _report)
        else:
            typer.echo(f"the controller of cluster {cluster.name!r} is in the Ray cluster at {cluster.ray.address}")
    finally:
        ray.shutdown()


def _report(state: ControllerProgress) -> None:
    """Report to the process that started this one."""
    from baton.cluster.backend_process import report_ready

    report_ready({"workers": state.workers, "pid": os.getpid()})
