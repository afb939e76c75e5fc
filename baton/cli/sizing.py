"""The commands that measure what serving costs, and size a cluster by it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import LENGTHS, LOCAL, ClusterName, ConfigFile, Json, Sets, Target, Tls, Token


def profile(  # noqa: PLR0913, PLR0917 (each is an option of the command)
    config: ConfigFile = LOCAL,
    sets: Sets = None,
    live: Annotated[Path | None, typer.Option(help="measure a running cluster instead; this file gets it")] = None,
    seconds: Annotated[float, typer.Option(min=5, help="about how long --live may take")] = 60.0,
    name: ClusterName = None,
    target: Target = None,
    admin: Annotated[str | None, typer.Option(help="with --target: a router's admin address")] = None,
    token: Token = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """Measure which kernels and verify passes are the best here for the model of a file. Later workers use it.

    With --live: what steps, links and the router of a running cluster cost, as `baton plan` takes it.
    """
    if live is not None:
        from baton.cli import profile_live
        from baton.cli.connect import Router
        from baton.errors import ConfigError

        if sets or config != LOCAL:
            given = f"--set {sets[0]}" if sets else f"-c {config}"
            raise ConfigError(f"--live: must be without -c and --set, as what runs has its own file, got {given}")
        profile_live.profile_live(Router(name, target, 120.0, token, tls), admin, live, seconds, as_json=as_json)
        return
    from baton.cli import profile as command

    command.profile(config, sets or [], as_json=as_json)


def plan(  # noqa: PLR0913, PLR0917 (each is an option of the command)
    profile: Annotated[str, typer.Option(help="a file of `baton profile --live`, or a name such as opt-13b-a100")],
    rate: Annotated[float | None, typer.Option(help="requests per second (default: the trace's)")] = None,
    prompt_tokens: Annotated[str, typer.Option(help=LENGTHS)] = "512",
    max_tokens: Annotated[str | None, typer.Option(help="new tokens, in the same words (default: 64)")] = None,
    trace: Annotated[Path | None, typer.Option(help="requests of a file: Mooncake's, Azure's, or JSON lines")] = None,
    scale: Annotated[float, typer.Option(help="divide the lengths of the trace by this")] = 1.0,
    arrivals: Annotated[str, typer.Option(help="poisson, constant or gamma:CV")] = "poisson",
    requests: Annotated[int, typer.Option(min=1, help="of a simulation, at least")] = 1000,
    ttft_ms: Annotated[float | None, typer.Option(help="the first token within (default: the file's, or 1000)")] = None,
    itl_ms: Annotated[float | None, typer.Option(help="mean time between tokens (default: the file's, or 100)")] = None,
    attainment: Annotated[float, typer.Option(help="the share of requests that must be within both")] = 0.9,
    gpus_at_most: Annotated[int, typer.Option(min=1, help="look no further")] = 16,
    what_if: Annotated[
        str | None, typer.Option(help="one layout, such as prefill=2,decode=1,workers=10000,fault=death:decode-0@5")
    ] = None,
    seed: Annotated[int, typer.Option(help="of arrivals, lengths and steps")] = 0,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="a cluster file: slo, pools, the router's bounds")
    ] = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Find the cheapest pools for a load and a goal by simulating them, and say whether disaggregation pays."""
    from baton.cli import plan as command

    command.plan(
        command.Asked(
            profile,
            rate,
            prompt_tokens,
            max_tokens,
            trace,
            scale,
            arrivals,
            requests,
            ttft_ms,
            itl_ms,
            attainment,
            gpus_at_most,
            what_if,
            seed,
            config,
            tuple(sets or ()),
        ),
        as_json=as_json,
    )
