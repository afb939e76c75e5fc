"""All commands with their options. Their code is in the other modules, which are imported when a command runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from baton.cli.bench import bench_app
from baton.cli.controller import controller
from baton.cli.options import (
    LENGTHS,
    LOCAL,
    AdminTarget,
    ClusterName,
    ConfigFile,
    Index,
    Json,
    Log,
    MaxTokens,
    ModelName,
    RouterIndex,
    Seed,
    Sets,
    Stay,
    Target,
    Temperature,
    ThinkWhileDecoding,
    Timeout,
    Tls,
    Token,
    TopK,
    TopP,
    WorkerId,
)
from baton.core import Role, sizes_text

if TYPE_CHECKING:
    from baton.cli.operate import Operator
    from baton.client.types import Options


def prefill_worker(
    config: ConfigFile = LOCAL, index: Index = 0, sets: Sets = None, log: Log = None, worker_id: WorkerId = None
) -> None:
    """Run a prefill worker as a plain process. The cluster's controller may change its role."""
    from baton.cli import serve

    serve.run_role(Role.PREFILL, config, sets or [], worker_id or f"prefill-{index}", log)


def decode_worker(
    config: ConfigFile = LOCAL, index: Index = 0, sets: Sets = None, log: Log = None, worker_id: WorkerId = None
) -> None:
    """Run a decode worker as a plain process. The cluster's controller may change its role."""
    from baton.cli import serve

    serve.run_role(Role.DECODE, config, sets or [], worker_id or f"decode-{index}", log)


def router(config: ConfigFile = LOCAL, index: RouterIndex = 0, sets: Sets = None, log: Log = None) -> None:
    """Run a router as a plain process."""
    from baton.cli import serve

    serve.run_router(config, sets or [], log, index)


def gateway(
    config: ConfigFile = LOCAL,
    target: Annotated[str | None, typer.Option("--target", help="a router's host:port (default: router.grpc)")] = None,
    sets: Sets = None,
    log: Log = None,
) -> None:
    """Run only OpenAI's HTTP API, at router.http, in front of a router."""
    from baton.cli import serve

    serve.run_gateway(config, sets or [], target, log)


Wait = Annotated[float, typer.Option("--wait", min=0, help="seconds to wait for completion; 0 means not to wait")]


def scale(
    sizes: Annotated[list[str], typer.Argument(help="such as prefill=2 decode=3")],
    wait: Wait = 0.0,
    name: ClusterName = None,
    target: AdminTarget = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """Set the number of workers of each pool. Surplus workers change their role, or finish their requests and end."""
    from baton.cli.operate import parse_sizes

    wanted = parse_sizes(sizes)
    operator = _operator(name, target, tls)
    plan = operator.scale(wanted)
    if wait:
        operator.wait_settled(plan.number, wait)
    sizes_of = {"prefill": plan.prefill, "decode": plan.decode}
    _print(sizes_of, f"planned workers: {sizes_text(plan.prefill, plan.decode)}", as_json, done=bool(wait))


def drain(
    worker: Annotated[str, typer.Argument(help="the worker's name in `baton status`")] = "",
    here: Annotated[
        bool, typer.Option("--here", help="all workers of this host, because the host will be shut down")
    ] = False,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="with --here: the cluster file, for its redis.url")
    ] = None,
    wait: Wait = 0.0,
    name: ClusterName = None,
    target: AdminTarget = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """Replace a worker: it accepts no new requests, finishes its present ones and ends."""
    if here is not (worker == "") or here is not (config is not None):
        raise typer.BadParameter("must have either WORKER, or --here -c FILE")
    if config is not None:
        from baton.cli.operate import drain_here

        drained = drain_here(config, wait)
        _print({"workers": drained}, f"draining: {', '.join(drained) or 'no worker here'}", as_json, done=bool(wait))
        return
    operator = _operator(name, target, tls)
    process = operator.drain(worker)
    if wait:
        operator.wait_gone(process, wait)
    _print({"worker": process}, f"{process} drains", as_json, done=bool(wait))


def restart(
    wait: Wait = 0.0,
    name: ClusterName = None,
    target: AdminTarget = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """Replace each worker by a new process, one after the other. No request fails because of that."""
    operator = _operator(name, target, tls)
    plan = operator.restart()
    if wait:
        operator.wait_settled(plan.number, wait)
    text = f"replacing all workers, generation {plan.generation}"
    _print({"generation": plan.generation}, text, as_json, done=bool(wait))


def trace(
    request: Annotated[str, typer.Argument(help="a request id (default: the request that ended last)")] = "",
    out: Annotated[Path | None, typer.Option(help="write a file for ui.perfetto.dev")] = None,
    name: ClusterName = None,
    target: AdminTarget = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """Show the time spent in each stage of a recent request, in the router and in its workers."""
    from baton.cli import trace as command

    command.trace(request, name, target, tls, out, as_json=as_json)


def _operator(name: str | None, target: str | None, tls: Path | None) -> Operator:
    from baton.cli.operate import Operator

    return Operator.find(name, target, tls)


def _print(facts: Mapping[str, object], text: str, as_json: bool, *, done: bool) -> None:
    if as_json:
        typer.echo(json.dumps({**facts, "done": done}))
        return
    typer.echo(text + (": done" if done else "; `baton status` shows the progress"))


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
    if live is not None:
        from baton.cli import profile_live
        from baton.cli.target import Router
        from baton.errors import ConfigError

        if sets or config != LOCAL:
            given = f"--set {sets[0]}" if sets else f"-c {config}"
            raise ConfigError(f"--live: must be without -c and --set, because a cluster is running, got {given}")
        profile_live.profile_live(Router(name, target, 120.0, token, tls), admin, live, seconds, as_json=as_json)
        return
    from baton.cli import profile_kernels as command

    command.profile(config, sets or [], as_json=as_json)


def plan(  # noqa: PLR0913, PLR0917 (each is an option of the command)
    profile: Annotated[str, typer.Option(help="a file of `baton profile --live`, or a name such as opt-13b-a100")],
    rate: Annotated[float | None, typer.Option(help="requests per second (default: the trace's)")] = None,
    prompt_tokens: Annotated[str, typer.Option(help=LENGTHS)] = "512",
    max_tokens: Annotated[str | None, typer.Option(help="new tokens, in the same form (default: 64)")] = None,
    trace: Annotated[Path | None, typer.Option(help="a file of requests: Mooncake's, Azure's, or JSON lines")] = None,
    scale: Annotated[float, typer.Option(help="divide the lengths of the trace by this")] = 1.0,
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
    from baton.cli import plan as command

    command.plan(
        command.PlanOptions(
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


Level = Literal["debug", "info", "warning", "error", "critical"]


def logs(
    name: Annotated[str | None, typer.Option("--name", help="the cluster's name; it may have ended")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="show new lines until Ctrl-C")] = False,
    request: Annotated[str, typer.Option("--request", help="only lines about this request")] = "",
    worker: Annotated[str, typer.Option("--worker", help="only lines of or about this worker, or of the router")] = "",
    level: Annotated[Level, typer.Option("--level", help="lowest level shown")] = "debug",
    since: Annotated[str, typer.Option("--since", help="only lines since then, such as 90s, 5m, 2h or 1d ago")] = "",
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", min=0, help="number of last lines (default: 100; with --since all)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON lines (default in a pipe)")] = False,
) -> None:
    """Show the log lines of all processes of a cluster started here, by time."""
    import time

    from baton.cli import logs as command
    from baton.logs import LEVELS

    begin = time.time() - command.parse_age(since) if since else 0.0
    wanted = command.LogFilter(request, worker, LEVELS[level.upper()], begin)
    command.logs(name, wanted, lines, follow=follow, as_json=as_json)


def top(
    name: ClusterName = None,
    target: AdminTarget = None,
    tls: Tls = None,
    interval: Annotated[float, typer.Option("--interval", min=0.1, max=60, help="seconds between two updates")] = 1.0,
) -> None:
    """Show a live view of the cluster in this terminal. Set BATON_TOKEN to an admin's token if it has tokens."""
    from baton.cli.top.app import top as command

    command(name, target, tls, interval)


app = typer.Typer(
    name="baton",
    help="Baton: a disaggregated LLM server. Prefill and decode on separate workers, the KV cache handed over.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
config_app = typer.Typer(help="Check, show and describe the cluster file.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.command()(controller)


@app.command()
def up(
    config: ConfigFile = LOCAL,
    sets: Sets = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="return when the cluster is ready")] = False,
    as_json: Json = False,
) -> None:
    """Start the cluster of a file. One Ctrl-C drains it, two stop it."""
    from baton.cluster.signals import stop_on_signals

    stop = stop_on_signals()  # before the slow imports, so that signals count during them
    from baton.cli import up as command

    command.up(config, sets or [], stop, detach=detach, as_json=as_json)


@app.command()
def pull(model: str) -> None:
    """Download a model, such as hf:Qwen/Qwen3-0.6B, to the local cache, and print its folder."""
    from baton.cli import up as command

    command.pull(model)


@app.command()
def down(name: ClusterName = None) -> None:
    """Stop a running cluster and wait until all of its processes are gone."""
    from baton.cli import up as command

    command.down(name)


@app.command()
def status(
    name: ClusterName = None,
    target: AdminTarget = None,
    tls: Tls = None,
    census: Annotated[bool, typer.Option("--census", help="holders of blocks; exit code 1 if some are lost")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="repeat each second until Ctrl-C")] = False,
    as_json: Json = False,
) -> None:
    """Show workers, their load and the block ledger. Set BATON_TOKEN to an admin's token if the cluster has tokens."""
    if census:
        from baton.cli import block_census as counted

        counted.census(name, target, tls, as_json=as_json)
        return
    from baton.cli import status as command

    show = partial(command.status, name, target, tls, as_json=as_json)
    command.watch(show) if watch else show()


app.command()(scale)
app.command()(drain)
app.command()(restart)
app.command()(logs)
app.command()(top)
app.command()(trace)


@app.command()
def generate(  # noqa: PLR0913, PLR0917 (each is an option of the command)
    prompt: Annotated[str, typer.Argument(help="the prompt; - reads it from standard input")],
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    n: Annotated[int, typer.Option("--n", help="number of answers, shown when all are complete")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="end the answer before this text; may be repeated")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="the same bits under any load")] = False,
    think_while_decoding: ThinkWhileDecoding = None,
    model: ModelName = "",
    show: Annotated[str, typer.Option(help="what to show: timings,tokens,thoughts")] = "",
    trace: Annotated[Path | None, typer.Option(help="write the request's trace to this file, for Perfetto")] = None,
    timeout: Timeout = 120.0,
    name: ClusterName = None,
    target: Target = None,
    token: Token = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """Stream one answer. Set BATON_TOKEN to your token if the cluster has tokens."""
    from baton.cli import generate as command
    from baton.cli.target import Router

    options: Options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "n": n}
    options |= {"seed": seed, "stop": stop or [], "deterministic": deterministic or None, "model": model}
    options |= {"think_while_decoding": think_while_decoding}
    wanted = command.GenerateOptions.parse(show, as_json=as_json)
    command.generate(Router(name, target, timeout, token, tls).client(), prompt, options, wanted, trace)


@app.command()
def chat(  # noqa: PLR0913, PLR0917 (each is an option of the command)
    system: Annotated[str, typer.Option(help="the system message")] = "",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    model: ModelName = "",
    timeout: Timeout = 120.0,
    name: ClusterName = None,
    target: Target = None,
    token: Token = None,
    tls: Tls = None,
) -> None:
    """Chat with the model. Ctrl-C ends an answer, Ctrl-D or /exit ends the conversation, /reset begins a new one."""
    from baton.cli import chat as command
    from baton.cli.target import Router

    options: Options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    options |= {"seed": seed, "model": model}
    command.chat(Router(name, target, timeout, token, tls).client(), options, system)


app.add_typer(bench_app, name="bench")


@app.command()
def certs(
    folder: Path,
    host: Annotated[list[str] | None, typer.Option(help="name or address of a host; may be repeated")] = None,
    days: Annotated[int, typer.Option(min=1, help="validity of the certificate in days")] = 365,
) -> None:
    """Make a CA and a cluster certificate for `security.tls`. A second run makes a new certificate of the same CA."""
    from baton.cli import certs as command

    command.certs(folder, host or [], days)


@app.command()
def demo(config: ConfigFile = LOCAL, sets: Sets = None, stay: Stay = None) -> None:
    """Start a cluster on free ports, answer two prompts, and show the work of each worker and the live page."""
    from baton.cluster.signals import stop_on_signals

    stop = stop_on_signals()
    from baton.cli import demo as command

    command.demo(config, sets or [], stop, stay=sys.stdout.isatty() if stay is None else stay)


@app.command()
def doctor(
    config: ConfigFile = LOCAL,
    sets: Sets = None,
    as_json: Json = False,
    transport: Annotated[
        str | None, typer.Option(help="only open and probe a channel of this kind between two processes here")
    ] = None,
) -> None:
    """Check whether a cluster can run here, and show a remedy for each problem."""
    from baton.cli import doctor as command

    command.doctor(config, sets or [], transport=transport, as_json=as_json)


@config_app.command("validate")
def config_validate(file: Path, sets: Sets = None) -> None:
    """Check a cluster file and print each mistake with its line and key."""
    from baton.cli import config as command

    command.validate(file, sets or [])


@config_app.command("show")
def config_show(file: Path, sets: Sets = None, as_json: Json = False) -> None:
    """Print the effective config with its defaults. Secrets are hidden."""
    from baton.cli import config as command

    command.show(file, sets or [], as_json=as_json)


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of the cluster file."""
    from baton.cli import config as command

    command.schema()


app.command("prefill-worker")(prefill_worker)
app.command("decode-worker")(decode_worker)
app.command()(router)
app.command()(gateway)
app.command()(profile)
app.command()(plan)
