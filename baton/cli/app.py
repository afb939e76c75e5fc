"""All commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from baton import __version__
from baton.cli.cluster.operate import drain, restart, scale
from baton.cli.cluster.up import (
    controller,
    decode_worker,
    demo,
    down,
    gateway,
    prefill_worker,
    pull,
    router,
    serve,
    up,
)
from baton.cli.cluster.vllm_options import ServeCommand
from baton.cli.examples import PANELS, epilog, panel
from baton.cli.inspect.logs import logs
from baton.cli.inspect.status import status, top
from baton.cli.inspect.trace import trace
from baton.cli.requests.bench import bench_app
from baton.cli.requests.chat import chat
from baton.cli.requests.generate import generate
from baton.cli.requests.replay import replay
from baton.cli.setup.certs import certs
from baton.cli.setup.config import config_app
from baton.cli.setup.doctor import doctor
from baton.cli.setup.quantize import quantize
from baton.cli.sizing.commands import plan, profile

app = typer.Typer(
    name="baton",
    help="Baton: a disaggregated LLM server. Prefill and decode on separate workers, the KV cache handed over.",
    epilog="Begin with `baton demo`, or serve a model: `baton serve Qwen/Qwen3-0.6B`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_FUNCTIONS: tuple[Callable[..., None], ...] = (
    *(serve, up, down, demo, pull, generate, chat, replay, status, top, logs, trace, scale, drain, restart),
    *(doctor, certs, plan, profile, quantize, router, prefill_worker, decode_worker, gateway, controller),
)
COMMANDS = {function.__name__.replace("_", "-"): function for function in _FUNCTIONS}
GROUPS = {"config": config_app, "bench": bench_app}


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"baton {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of `baton` itself, which `_version` handles."""


for command in (name for names in PANELS.values() for name in names):  # in the order in which `--help` lists them
    group, examples = panel(command), epilog(command)
    if command in GROUPS:
        app.add_typer(GROUPS[command], name=command, rich_help_panel=group, epilog=examples)
        continue
    kind = ServeCommand if command == "serve" else None
    app.command(command, cls=kind, rich_help_panel=group, epilog=examples)(COMMANDS[command])
