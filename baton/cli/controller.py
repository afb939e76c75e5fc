"""`baton controller`: the controller in a Ray that others run, had by whoever starts that Ray, and by `baton up`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.options import ConfigFile, Sets

if TYPE_CHECKING:
    from baton.cluster.controller_actor import ControlState, Parts
    from baton.cluster.local import LocalControl
    from baton.cluster.placement import Placement
    from baton.cluster.stop import Stop
    from baton.config import ClusterConfig

GRACE_S = 5.0
FOLLOW_WAIT_S = 5.0  # who is followed was there before; who follows is started again

Wait = Annotated[float, typer.Option("--wait", min=0, help="seconds that the Ray may take to be there")]
Ends = Annotated[bool, typer.Option("--stop", help="end the workers and the controller instead")]
Follows = Annotated[bool, typer.Option("--follow", hidden=True, help="stay until told to stop, or until it is lost")]


def controller(
    config: ConfigFile, sets: Sets = None, wait: Wait = 300, stop: Ends = False, follow: Follows = False
) -> None:
    """Have a controller in the Ray at ray.address, which keeps the workers of a file there. Does not wait for them."""
    from baton.cluster.stop import stop_on_signals

    told = stop_on_signals()
    from baton.cluster import remote
    from baton.cluster.processes import die_with_parent
    from baton.config import load_config
    from baton.logs import configure_logging

    die_with_parent()
    cluster = load_config(config, sets or [], os.environ)
    configure_logging(cluster.log.level, cluster.log.format)
    ray = remote.join(cluster, FOLLOW_WAIT_S if follow else wait, told)
    try:
        if stop:
            remote.end(ray, cluster, parts(), GRACE_S)
            typer.echo(f"the workers of cluster {cluster.name!r} have ended")
        elif follow:
            _follow(ray, cluster, told)
        else:
            remote.ensure(ray, cluster, parts(), detached=True)
            typer.echo(f"the controller of cluster {cluster.name!r} is in the Ray at {cluster.ray.address}")
    finally:
        ray.shutdown()


def _follow(ray: object, config: ClusterConfig, stop: Stop) -> None:
    from baton.cluster import remote
    from baton.cluster.processes import report_ready

    def ready(state: ControlState) -> None:
        report_ready({"workers": state.workers, "pid": os.getpid()})

    detached = not remote.is_local_ledger(config.redis.url)  # workers cannot outlive a Redis that ends with `baton up`
    remote.follow(ray, remote.ensure(ray, config, parts(), detached=detached), stop, ready)


def parts() -> Parts:
    """What the actors are made of."""
    from baton.cli.roles import role_factories
    from baton.cluster.controller_actor import Parts
    from baton.worker.actor import WorkerActor

    return Parts(WorkerActor, role_factories(), make_control)


def make_control(config: ClusterConfig, placement: Placement) -> LocalControl:
    """In the process of the controller's actor."""
    from baton.cluster.local import LocalControl

    return LocalControl(config, placement)
