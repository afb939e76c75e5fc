"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import baton

LOCAL = Path("configs/local.yaml")
SHIPPED = Path(baton.__file__).parent / "shipped"  # only in a wheel of `make wheel`

# The cluster file
ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="the cluster file, in YAML", show_default=True)]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="key=value that overrides the file, such as decode.replicas=2")
]

# A running cluster
ClusterName = Annotated[str | None, typer.Option("--name", help="the cluster's name (default: the only one running)")]
Target = Annotated[
    str | None,
    typer.Option("--target", help="a router's host:port, or several with commas, instead of a local cluster"),
]
AdminTarget = Annotated[
    str | None,
    typer.Option("--target", help="a router's admin address, or several with commas, instead of a local cluster"),
]
TLS = "a CA file, a folder of `baton certs`, or system (default: the local cluster's)"
Tls = Annotated[Path | None, typer.Option("--tls", envvar="BATON_TLS", help=TLS)]
Token = Annotated[str | None, typer.Option("--token", envvar="BATON_TOKEN", help="the bearer token")]

# Requests
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="longest answer in tokens")]
Temperature = Annotated[float, typer.Option("--temperature", help="sampling temperature; 0 means greedy")]
TopP = Annotated[float, typer.Option("--top-p", help="draw from the likeliest tokens with this total probability")]
TopK = Annotated[int, typer.Option("--top-k", help="draw from so many of the likeliest tokens; 0 means from all")]
Seed = Annotated[int | None, typer.Option("--seed", help="equal seeds draw equal tokens")]
ModelName = Annotated[str, typer.Option("--model", help="the model's name (default: the served one)")]
Timeout = Annotated[float, typer.Option("--timeout", help="timeout of each request in seconds")]

# Output
Json = Annotated[bool, typer.Option("--json", help="print JSON, for programs")]


def or_shipped(file: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the file, or outside a repository the wheel's `LOCAL`, with the setting that names the wheel's model."""
    shipped = SHIPPED / LOCAL
    if file != LOCAL or file.exists() or not shipped.exists():
        return file, ()
    return shipped, (f"model.path={SHIPPED / 'models' / 'demo'}",)
