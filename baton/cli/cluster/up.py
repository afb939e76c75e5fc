"""`baton up | down | pull | demo`: start and stop a cluster of a file."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from baton.cli.options import LOCAL, ClusterName, ConfigFile, Json, Sets

Detach = Annotated[bool, typer.Option("--detach", "-d", help="return when the cluster is ready")]
STAY = "serve the live page with sample requests until Ctrl-C (default: on a terminal)"
Stay = Annotated[bool | None, typer.Option("--stay/--no-stay", help=STAY)]


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
