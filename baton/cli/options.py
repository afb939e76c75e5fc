"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

LOCAL = Path("configs/local.yaml")
LENGTHS = "N, fixed:N, uniform:LOW-HIGH, lognormal:MEAN,CV[,MOST], zipf:EXPONENT,MOST, file:PATH"
ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="the cluster file", show_default=True)]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="key=value that overrides the file, such as decode.replicas=2")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
ClusterName = Annotated[str | None, typer.Option("--name", help="the cluster's name (default: the only one running)")]
Target = Annotated[
    str | None,
    typer.Option("--target", help="a router's host:port, or several with commas, instead of a local cluster"),
]
Token = Annotated[str | None, typer.Option("--token", envvar="BATON_TOKEN", help="the bearer token")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="maximum new tokens")]
Temperature = Annotated[float, typer.Option("--temperature", help="sampling temperature; 0 means greedy")]
TopP = Annotated[float, typer.Option("--top-p")]
TopK = Annotated[int, typer.Option("--top-k", help="0 means off")]
ThinkWhileDecoding = Annotated[
    bool | None,
    typer.Option(
        "--think-while-decoding/--no-think-while-decoding", help="for a model that thinks (default: the cluster file's)"
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", help="seed of the sampling noise")]
ModelName = Annotated[str, typer.Option("--model", help="the model's name (default: the served one)")]
Timeout = Annotated[float, typer.Option("--timeout", help="timeout of each request in seconds")]
AdminTarget = Annotated[
    str | None, typer.Option("--target", help="a router's admin address instead of a local cluster")
]
Tls = Annotated[
    Path | None,
    typer.Option(
        "--tls",
        envvar="BATON_TLS",
        help="a CA file, a folder of `baton certs`, or system (default: the local cluster's)",
    ),
]
Index = Annotated[int, typer.Option("--index", min=0, help="the worker's number within its pool")]
WorkerId = Annotated[str | None, typer.Option("--id", help="the worker's id in any role (default: <role>-<index>)")]
RouterIndex = Annotated[int, typer.Option("--index", min=0, help="the router's number, of router.replicas")]
Log = Annotated[Path | None, typer.Option("--log", help="append the output to this file")]
Stay = Annotated[
    bool | None,
    typer.Option(
        "--stay/--no-stay",
        help="serve the live page with sample requests until Ctrl-C (default: on a terminal)",
    ),
]
