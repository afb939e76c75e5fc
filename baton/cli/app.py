"""The commands and their options. What they do lies in the modules beside, imported when a command runs."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli import one_role, operating, sizing, watching
from baton.cli.bench.command import bench_app
from baton.cli.controller import controller
from baton.cli.options import (
    LOCAL,
    AdminTarget,
    ClusterName,
    ConfigFile,
    Json,
    MaxTokens,
    ModelName,
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
)

if TYPE_CHECKING:
    from baton.client.types import Options

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
    detach: Annotated[bool, typer.Option("--detach", "-d", help="return when it runs")] = False,
    as_json: Json = False,
) -> None:
    """Start the cluster of a file. Ctrl-C once drains, twice stops."""
    from baton.cluster.signals import stop_on_signals

    stop = stop_on_signals()  # before the imports, which take a while: a signal there must count too
    from baton.cli import up as command

    command.up(config, sets or [], stop, detach=detach, as_json=as_json)


@app.command()
def pull(model: str) -> None:
    """Download a model, such as hf:Qwen/Qwen3-0.6B, to the local cache, and print its folder."""
    from baton.cli import model as command

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
    census: Annotated[bool, typer.Option("--census", help="who holds which blocks; 1 if some are lost")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="again each second, until Ctrl-C")] = False,
    as_json: Json = False,
) -> None:
    """Show workers, their load and the block ledger. BATON_TOKEN: an admin's token, if the cluster has tokens."""
    if census:
        from baton.cli import census as counted

        counted.census(name, target, tls, as_json=as_json)
        return
    from baton.cli import status as command

    show = partial(command.status, name, target, tls, as_json=as_json)
    command.watch(show) if watch else show()


app.command()(operating.scale)
app.command()(operating.drain)
app.command()(operating.restart)
app.command()(watching.logs)
app.command()(watching.top)
app.command()(operating.trace)


@app.command()
def generate(  # noqa: PLR0913, PLR0917 (each is an option of the command)
    prompt: Annotated[str, typer.Argument(help="the prompt; - reads it from standard input")],
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    n: Annotated[int, typer.Option("--n", help="so many answers, shown when all are there")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text; may be repeated")] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="the same bits, whatever else is computed")
    ] = False,
    think_while_decoding: ThinkWhileDecoding = None,
    model: ModelName = "",
    show: Annotated[str, typer.Option(help="timings,tokens,thoughts")] = "",
    trace: Annotated[Path | None, typer.Option(help="write where the time went to this file, for Perfetto")] = None,
    timeout: Timeout = 120.0,
    name: ClusterName = None,
    target: Target = None,
    token: Token = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """Stream one answer. BATON_TOKEN: your token, if the cluster has tokens."""
    from baton.cli import generate as command
    from baton.cli.connect import Router

    options: Options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "n": n}
    options |= {"seed": seed, "stop": stop or [], "deterministic": deterministic or None, "model": model}
    options |= {"think_while_decoding": think_while_decoding}
    wanted = command.Shown.parse(show, as_json=as_json)
    command.generate(Router(name, target, timeout, token, tls).client(), prompt, options, wanted, trace)


@app.command()
def chat(  # noqa: PLR0913, PLR0917 (each is an option of the command)
    system: Annotated[str, typer.Option(help="what the model is told first")] = "",
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
    """Talk in turns; Ctrl-C ends an answer, Ctrl-D or /exit the conversation, /reset begins a new one."""
    from baton.cli import chat as command
    from baton.cli.connect import Router

    options: Options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    options |= {"seed": seed, "model": model}
    command.chat(Router(name, target, timeout, token, tls).client(), options, system)


app.add_typer(bench_app, name="bench")


@app.command()
def certs(
    folder: Path,
    host: Annotated[list[str] | None, typer.Option(help="a name or address to be reached by; may be repeated")] = None,
    days: Annotated[int, typer.Option(min=1, help="of the certificate")] = 365,
) -> None:
    """Make a CA and a certificate for a cluster, for `security.tls`. Run again: a new certificate of the same CA."""
    from baton.cli import certs as command

    command.certs(folder, host or [], days)


@app.command()
def demo(config: ConfigFile = LOCAL, sets: Sets = None, stay: Stay = None) -> None:
    """Start a cluster on free ports, answer two prompts, show which worker did what, and its live page."""
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
        str | None, typer.Option(help="Only open a channel of this kind between two processes here, and probe it.")
    ] = None,
) -> None:
    """Look for what would keep a cluster from running here, and say what to do."""
    from baton.cli import doctor as command

    command.doctor(config, sets or [], transport=transport, as_json=as_json)


@config_app.command("validate")
def config_validate(file: Path, sets: Sets = None) -> None:
    """Check a cluster file; every mistake with its line and key."""
    from baton.cli import config as command

    command.validate(file, sets or [])


@config_app.command("show")
def config_show(file: Path, sets: Sets = None, as_json: Json = False) -> None:
    """Print the effective config, defaults included, secrets hidden."""
    from baton.cli import config as command

    command.show(file, sets or [], as_json=as_json)


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of the cluster file."""
    from baton.cli import config as command

    command.schema()


app.command("prefill-worker")(one_role.prefill_worker)
app.command("decode-worker")(one_role.decode_worker)
app.command()(one_role.router)
app.command()(one_role.gateway)
app.command()(sizing.profile)
app.command()(sizing.plan)
