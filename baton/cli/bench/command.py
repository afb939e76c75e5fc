"""`baton bench` and `baton bench compare`: their options, and from them to the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.options import ClusterName, Json, ModelName, Target, Temperature, Timeout, Tls, Token

if TYPE_CHECKING:
    from baton.cli.bench.servers import Server
    from baton.cli.connect import Router
    from baton.client.types import Options

LENGTHS = "N, fixed:N, uniform:LOW-HIGH, lognormal:MEAN,CV[,MOST], zipf:EXPONENT,MOST, file:PATH"
TRACES = "Mooncake's JSON lines, Azure's CSV, or JSON lines: prompt or prompt_tokens, max_tokens, at_s"
PICTURES = (".png", ".svg", ".pdf")

bench_app = typer.Typer(invoke_without_command=True)


@bench_app.callback()
def bench(  # noqa: PLR0913, PLR0917 (each is an option of the command)
    context: typer.Context,
    concurrency: Annotated[int | None, typer.Option(min=1, help="closed loop: so many under way (default: 8)")] = None,
    rate: Annotated[float | None, typer.Option(help="open loop: so many per second, answered or not")] = None,
    arrivals: Annotated[
        str | None, typer.Option(help="poisson, constant, gamma:CV, or trace (default: poisson, with --rate)")
    ] = None,
    max_in_flight: Annotated[int, typer.Option(min=1, help="open loop: not sent if so many are under way")] = 1024,
    requests: Annotated[int | None, typer.Option(min=1, help="so many in all (default: 100, or the trace)")] = None,
    duration: Annotated[float | None, typer.Option(min=0, help="begin no request after so many seconds")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="so many before, which do not count")] = 0,
    prompt_tokens: Annotated[str, typer.Option(help=f"of random prompts: {LENGTHS}")] = "128",
    max_tokens: Annotated[str | None, typer.Option(help="new tokens of each request, as above (default: 64)")] = None,
    trace: Annotated[Path | None, typer.Option(help=TRACES)] = None,
    scale: Annotated[float, typer.Option(help="divides all lengths of the trace")] = 1.0,
    speed: Annotated[float, typer.Option(help="replay the trace so many times as fast")] = 1.0,
    clip: Annotated[bool, typer.Option("--clip", help="cut prompts that are too long for the model")] = False,
    deterministic_share: Annotated[float, typer.Option(min=0, max=1, help="of the requests")] = 0.0,
    temperature: Temperature = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="always all of the new tokens")] = True,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="token ids are below this (default: the model's; 256 where unknown)")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="of times, lengths and prompts")] = 0,
    ttft_ms: Annotated[float | None, typer.Option(help="goodput: the first token within")] = None,
    itl_ms: Annotated[float | None, typer.Option(help="goodput: mean time between tokens within")] = None,
    gap_ms: Annotated[float | None, typer.Option(help="goodput: each time between tokens within")] = None,
    e2e_ms: Annotated[float | None, typer.Option(help="goodput: the whole answer within")] = None,
    http: Annotated[str | None, typer.Option(metavar="URL", help="ask OpenAI's HTTP API there, not gRPC")] = None,
    model: ModelName = "",
    timeout: Timeout = 120.0,
    name: ClusterName = None,
    target: Target = None,
    token: Token = None,
    tls: Tls = None,
    out: Annotated[Path | None, typer.Option(help="write the report and all samples to this file")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw them: a .png, .svg or .pdf (needs matplotlib)")] = None,
    as_json: Json = False,
) -> None:
    """Send requests and measure: latencies, throughput, goodput. `baton bench compare A B`: two reports."""
    if context.invoked_subcommand is not None:
        return
    from baton.cli.bench import output
    from baton.cli.bench.plan import Load, Plan
    from baton.cli.bench.sample import Goals
    from baton.cli.connect import Router

    _check_files(out, plot)
    plan = Plan(
        concurrency=concurrency,
        rate=rate,
        arrivals=arrivals,
        max_in_flight=max_in_flight,
        requests=requests,
        duration=duration,
        warmup=warmup,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        trace=trace,
        scale=scale,
        speed=speed,
        clip=clip,
        deterministic_share=deterministic_share,
        vocab_size=vocab_size,
        seed=seed,
    )
    options: Options = {"temperature": temperature, "ignore_eos": ignore_eos or None, "model": model}
    router = Router(name, target, timeout, token, tls)
    about = {"api": "grpc" if http is None else "http", **options}
    load, goals = Load.read(plan), Goals(ttft_ms, itl_ms, gap_ms, e2e_ms)
    output.bench(_server(router, http, options), load, model, goals, output.Output(as_json, out, plot, about))


@bench_app.command("compare")
def compare(first: Path, second: Path, as_json: Json = False) -> None:
    """Two reports of --json or --out beside each other, and what was not asked alike. Exit code 2: a file is none."""
    from baton.cli.bench import compare as command

    command.compare(first, second, as_json=as_json)


def _server(router: Router, url: str | None, options: Options) -> Server:
    from baton.cli.bench.servers import GrpcServer
    from baton.clock import SystemClock

    if url is None:
        return GrpcServer(router.async_client(max_retries=0), options, SystemClock())
    from baton.cli.bench.http import HttpServer

    return HttpServer(url, options, SystemClock(), router.timeout, router.token, router.authorities())


def _check_files(out: Path | None, plot: Path | None) -> None:
    """Before anything is sent. Raises BadParameter (exit code 2)."""
    from importlib.util import find_spec

    for option, path in (("--out", out), ("--plot", plot)):
        if path is not None and not path.parent.is_dir():
            raise typer.BadParameter(f"{option}: there is no folder {path.parent}")
    if plot is not None and plot.suffix not in PICTURES:
        raise typer.BadParameter(f"--plot: must end in one of {', '.join(PICTURES)}, got {plot}")
    if plot is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("--plot: needs matplotlib: pip install 'baton-serve[plots]'")
