"""All commands."""

from __future__ import annotations

from collections.abc import Callable

import typer

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
from baton.cli.inspect.logs import logs
from baton.cli.inspect.status import status, top
from baton.cli.inspect.trace import trace
from baton.cli.requests.bench import bench_app
from baton.cli.requests.chat import chat
from baton.cli.requests.generate import generate
from baton.cli.setup.certs import certs
from baton.cli.setup.config import config_app
from baton.cli.setup.doctor import doctor
from baton.cli.setup.quantize import quantize
from baton.cli.sizing.commands import plan, profile

app = typer.Typer(
    name="baton",
    help="Baton: a disaggregated LLM server. Prefill and decode on separate workers, the KV cache handed over.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
COMMANDS: list[Callable[..., None]] = [controller, up, pull, down, status, scale, drain, restart, logs, top, trace]
COMMANDS += [
    generate,
    chat,
    certs,
    demo,
    doctor,
    prefill_worker,
    decode_worker,
    router,
    gateway,
    profile,
    plan,
    quantize,
]
# `serve` answers options of `vllm serve` by itself.
app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(serve)
for command in COMMANDS:  # in the order in which `--help` lists them
    app.command()(command)
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")
