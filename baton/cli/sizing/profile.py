"""`baton profile`: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import LOCAL, ClusterName, ConfigFile, Json, Sets, Target, Tls, Token
from baton.errors import ConfigError


def profile(  # noqa: PLR0913, PLR0917 (each is an option of the command)
    config: ConfigFile = LOCAL,
    sets: Sets = None,
    live: Annotated[Path | None, typer.Option(help="write the profile of a running cluster to this file")] = None,
    seconds: Annotated[float, typer.Option(min=5, help="approximate duration of --live")] = 60.0,
    name: ClusterName = None,
    target: Target = None,
    admin: Annotated[str | None, typer.Option(help="with --target: a router's admin address")] = None,
    token: Token = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """Measure the best kernels and verify passes on this machine for the model of a file. Later workers use them.

    --live measures the cost of steps, links and the router of a running cluster, as input for `baton plan`.
    """
    if live is None:
        from baton.cli.sizing.profile_kernels import profile_kernels

        profile_kernels(config, sets or [], as_json=as_json)
        return
    if sets or config != LOCAL:
        given = f"--set {sets[0]}" if sets else f"-c {config}"
        raise ConfigError(f"--live: must be without -c and --set, because a cluster is running, got {given}")
    from baton.cli.sizing.profile_live import profile_live
    from baton.cli.target import Router

    profile_live(Router(name, target, 120.0, token, tls), admin, live, seconds, as_json=as_json)
