"""`baton bench` and `baton bench compare`: their options, and how these become a run and its report."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.bench.lengths import KINDS
from baton.cli.options import ClusterName, Json, ModelName, Target, Temperature, Timeout, Tls, Token
from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.bench.requests import BenchPlan
    from baton.cli.target import Router

PICTURES = (".png", ".svg", ".pdf")
TRACES = "Mooncake's JSON lines, Azure's CSV, or JSON lines: prompt or prompt_tokens, max_tokens, timestamp (ms)"

Concurrency = Annotated[int | None, typer.Option(min=1, help="closed loop: number of requests in flight (default: 8)")]
Arrivals = Annotated[
    str | None, typer.Option(help="poisson, constant, gamma:CV, or trace (default: poisson, with --rate)")
]
MaxInFlight = Annotated[int, typer.Option(min=1, help="open loop: a request is dropped if so many are in flight")]
VocabSize = Annotated[
    int | None, typer.Option(min=1, help="upper limit of token ids (default: the model's, or 256 if unknown)")
]
GapPercentile = Annotated[
    float, typer.Option(min=0, max=100, help="apply --gap-ms to this percentile of a request's ITLs")
]
Http = Annotated[str | None, typer.Option(metavar="URL", help="use OpenAI's HTTP API at this URL instead of gRPC")]
First = Annotated[Path, typer.Argument(metavar="A", help="a report")]
Second = Annotated[Path, typer.Argument(metavar="B", help="a report")]
Promise = Annotated[
    tuple[float, float], typer.Option(metavar="TTFT ITL", help="send these limits as a promise; 0 means none")
]
Limits = tuple[float | None, float | None, float | None, float, float | None]  # of goodput
Plot = Annotated[Path | None, typer.Option(help="draw the samples into a .png, .svg or .pdf (needs matplotlib)")]

Duration = Annotated[float | None, typer.Option(min=0, help="seconds after which no request is sent")]

bench_app = typer.Typer(invoke_without_command=True)


@bench_app.callback()
def bench(  # noqa: PLR0913, PLR0917 (each is an option of the command)
    context: typer.Context,
    concurrency: Concurrency = None,
    rate: Annotated[float | None, typer.Option(help="open loop: requests per second, whether answered or not")] = None,
    arrivals: Arrivals = None,
    max_in_flight: MaxInFlight = 1024,
    requests: Annotated[int | None, typer.Option(min=1, help="number of requests (default: 100, or the trace)")] = None,
    duration: Duration = None,
    warmup: Annotated[int, typer.Option(min=0, help="number of requests before the measurement")] = 0,
    prompt_tokens: Annotated[str, typer.Option(help=f"length of random prompts: {KINDS}")] = "128",
    max_tokens: Annotated[str | None, typer.Option(help="new tokens of each request, as above (default: 64)")] = None,
    trace: Annotated[Path | None, typer.Option(help=TRACES)] = None,
    scale: Annotated[float, typer.Option(help="divisor of all lengths of the trace")] = 1.0,
    every: Annotated[int, typer.Option(min=1, help="replay each so many-th conversation of the trace")] = 1,
    speed: Annotated[float, typer.Option(help="factor by which the trace is replayed faster")] = 1.0,
    clip: Annotated[bool, typer.Option("--clip", help="cut prompts that are too long for the model")] = False,
    deterministic_share: Annotated[float, typer.Option(min=0, max=1, help="share of deterministic requests")] = 0.0,
    temperature: Temperature = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="generate all new tokens of each request")] = True,
    vocab_size: VocabSize = None,
    seed: Annotated[int, typer.Option(min=0, help="seed of times, lengths and prompts")] = 0,
    ttft_ms: Annotated[float | None, typer.Option(help="goodput: limit of TTFT")] = None,
    itl_ms: Annotated[float | None, typer.Option(help="goodput: limit of mean ITL")] = None,
    gap_ms: Annotated[float | None, typer.Option(help="goodput: limit of each ITL")] = None,
    gap_percentile: GapPercentile = 100.0,
    e2e_ms: Annotated[float | None, typer.Option(help="goodput: limit of the whole answer's time")] = None,
    promise_ms: Promise = (0.0, 0.0),
    http: Http = None,
    model: ModelName = "",
    timeout: Timeout = 120.0,
    name: ClusterName = None,
    target: Target = None,
    token: Token = None,
    tls: Tls = None,
    out: Annotated[Path | None, typer.Option(help="write the report and all samples to this file")] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Send requests and measure latencies, throughput and goodput. `baton bench compare A B` compares two reports."""
    if context.invoked_subcommand is not None:
        return
    from baton.bench.requests import BenchPlan

    plan = BenchPlan(trace=trace, scale=scale, every=every, speed=speed, clip=clip, vocab_size=vocab_size, seed=seed)
    plan = replace(plan, concurrency=concurrency, rate=rate, arrivals=arrivals, requests=requests, duration=duration)
    plan = replace(plan, max_in_flight=max_in_flight, warmup=warmup, prompt_tokens=prompt_tokens, ignore_eos=ignore_eos)
    plan = replace(plan, max_tokens=max_tokens, deterministic_share=deterministic_share, temperature=temperature)
    plan = replace(plan, model=model, promise_ms=promise_ms)
    goals = ttft_ms, itl_ms, gap_ms, gap_percentile, e2e_ms
    _run(plan, goals, _router(name, target, timeout, token, tls), http, as_json, out, plot)


@bench_app.command("compare")
def compare(first: First, second: Second, as_json: Json = False) -> None:
    """Compare two reports of --json or --out, and list different options. The exit code is 2 if a file is no report."""
    from baton.bench.compare import print_comparison

    print_comparison(first, second, as_json=as_json)


def _router(name: str | None, target: str | None, timeout: float, token: str | None, tls: Path | None) -> Router:
    from baton.cli.target import Router

    return Router(name, target, timeout, token, tls)


def _run(
    plan: BenchPlan, limits: Limits, router: Router, url: str | None, as_json: bool, out: Path | None, plot: Path | None
) -> None:
    _check_files(out, plot)
    from baton.bench.output import Output, run_bench
    from baton.bench.requests import Load
    from baton.bench.sample import Goals
    from baton.bench.targets import GrpcServer, HttpServer, Server
    from baton.client import Options
    from baton.clock import SystemClock

    if url is not None and (router.target or router.name):
        raise ConfigError("--http: cannot be combined with --target or --name, because the URL names the server")
    (goals := Goals(*limits)).check()
    plan = replace(plan, api="grpc" if url is None else "http")
    options = Options(temperature=plan.temperature, ignore_eos=plan.ignore_eos or None, model=plan.model)
    options |= Options(ttft_ms=plan.promise_ms[0] or None, itl_ms=plan.promise_ms[1] or None)
    server: Server
    if url is None:
        server = GrpcServer(router.async_client(max_retries=0), options, SystemClock())
    else:
        server = HttpServer(url, options, SystemClock(), router.timeout, router.token, router.authorities())
    run_bench(server, Load.read(plan), goals, Output(as_json, out, plot))


def _check_files(out: Path | None, plot: Path | None) -> None:
    """Check output files before anything is sent. Raises BadParameter (exit code 2)."""
    for option, path in (("--out", out), ("--plot", plot)):
        if path is not None and not path.parent.is_dir():
            raise typer.BadParameter(f"{option}: there is no folder {path.parent}")
        if path is not None and path.is_dir():
            raise typer.BadParameter(f"{option}: {path} is a folder")
        if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
            raise typer.BadParameter(f"{option}: no permission to write {path}")
    if plot is not None and plot.suffix not in PICTURES:
        raise typer.BadParameter(f"--plot: must end in one of {', '.join(PICTURES)}, got {plot}")
    if plot is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("--plot: needs matplotlib: pip install 'baton-serve[plots]'")
