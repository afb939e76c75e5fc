"""`baton profile` and `baton plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.bench.lengths import KINDS
from baton.cli.options import LOCAL, ClusterName, ConfigFile, Json, Sets, Target, Tls, Token, or_shipped
from baton.errors import ConfigError


def profile(  # noqa: PLR0913, PLR0917 (each is an option of the command)
    config: ConfigFile = LOCAL,
    sets: Sets = None,
    live: Annotated[Path | None, typer.Option(help="write the profile of a running cluster to this file")] = None,
    seconds: Annotated[float, typer.Option(min=5, help="approximate duration of --live")] = 60.0,
    name: ClusterName = None,
    target: Target = None,
    admin: Annotated[str | None, typer.Option(help="with --target: a router's admin address")] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, help="with --target: the devices of each worker, which it does not report")
    ] = None,
    token: Token = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """Measure the best kernels and verify passes on this machine for the model of a file. Later workers use them.

    --live measures the cost of steps, links and the router of a running cluster, as input for `baton plan`.
    """
    if live is None:
        from baton.cli.sizing.profile_kernels import profile_kernels

        if name or target or admin or tensor_parallel:
            raise ConfigError("--name, --target, --admin and --tensor-parallel: must be with --live FILE")
        file, model = or_shipped(config)
        profile_kernels(file, [*model, *(sets or [])], as_json=as_json)
        return
    if sets or config != LOCAL:
        given = f"--set {sets[0]}" if sets else f"-c {config}"
        raise ConfigError(f"--live: must be without -c and --set, because a cluster is running, got {given}")
    from baton.cli.sizing.profile_live import profile_live
    from baton.cli.target import Router

    profile_live(Router(name, target, 120.0, token, tls), admin, live, seconds, tensor_parallel, as_json=as_json)


def plan(  # noqa: PLR0913, PLR0917 (each is an option of the command)
    profile: Annotated[str, typer.Option(help="a file of `baton profile --live`, or a name such as opt-13b-a100")],
    rate: Annotated[float | None, typer.Option(help="requests per second (default: the trace's)")] = None,
    prompt_tokens: Annotated[str, typer.Option(help=KINDS)] = "512",
    max_tokens: Annotated[str | None, typer.Option(help="new tokens, in the same form (default: 64)")] = None,
    trace: Annotated[Path | None, typer.Option(help="a file of requests: Mooncake's, Azure's, or JSON lines")] = None,
    scale: Annotated[float, typer.Option(help="divide the lengths of the trace by this")] = 1.0,
    every: Annotated[int, typer.Option(min=1, help="take each so many-th conversation of the trace")] = 1,
    arrivals: Annotated[str, typer.Option(help="poisson, constant or gamma:CV")] = "poisson",
    requests: Annotated[int, typer.Option(min=1, help="minimum requests of a simulation")] = 1000,
    ttft_ms: Annotated[float | None, typer.Option(help="goal for TTFT (default: the file's, or 1000)")] = None,
    itl_ms: Annotated[float | None, typer.Option(help="goal for mean ITL (default: the file's, or 100)")] = None,
    attainment: Annotated[float, typer.Option(help="share of requests that must meet both goals")] = 0.9,
    gpus_at_most: Annotated[int, typer.Option(min=1, help="maximum GPUs of a layout")] = 16,
    what_if: Annotated[
        str | None, typer.Option(help="one layout, such as prefill=2,decode=1,workers=10000,fault=death:decode-0@5")
    ] = None,
    seed: Annotated[int, typer.Option(help="seed of arrivals, lengths and steps")] = 0,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="a cluster file, for its slo, pools and router limits")
    ] = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Find the cheapest pools for a load and a goal by simulation, and whether disaggregation pays."""
    from baton.cli.sizing.planning import PlanOptions, print_plan

    options = PlanOptions(
        profile=profile, rate=rate, prompt_tokens=prompt_tokens, max_tokens=max_tokens, trace=trace, scale=scale,
        every=every, times=arrivals, requests=requests, ttft_ms=ttft_ms, itl_ms=itl_ms, attainment=attainment,
        gpus=gpus_at_most, what_if=what_if, seed=seed, config=config, sets=tuple(sets or ()),
    )  # fmt: skip
    print_plan(options, as_json=as_json)
