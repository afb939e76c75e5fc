"""`baton prefill-worker | decode-worker | router | gateway`: one role as a process, by hand or from `baton up`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import LOCAL, ConfigFile, Sets
from baton.core import Role

Index = Annotated[int, typer.Option("--index", min=0, help="the worker's number within its pool")]
WorkerId = Annotated[str | None, typer.Option("--id", help="the worker's id in any role (default: <role>-<index>)")]
RouterIndex = Annotated[int, typer.Option("--index", min=0, help="the router's number, of router.replicas")]
Upstream = Annotated[str | None, typer.Option("--target", help="a router's host:port (default: router.grpc)")]
Log = Annotated[Path | None, typer.Option("--log", help="append the output to this file")]


def prefill_worker(
    config: ConfigFile = LOCAL, index: Index = 0, sets: Sets = None, log: Log = None, worker_id: WorkerId = None
) -> None:
    """Run a prefill worker as a plain process. The cluster's controller may change its role."""
    from baton.cli.cluster import serve

    serve.run_role(Role.PREFILL, config, sets or [], worker_id or f"prefill-{index}", log)


def decode_worker(
    config: ConfigFile = LOCAL, index: Index = 0, sets: Sets = None, log: Log = None, worker_id: WorkerId = None
) -> None:
    """Run a decode worker as a plain process. The cluster's controller may change its role."""
    from baton.cli.cluster import serve

    serve.run_role(Role.DECODE, config, sets or [], worker_id or f"decode-{index}", log)


def router(config: ConfigFile = LOCAL, index: RouterIndex = 0, sets: Sets = None, log: Log = None) -> None:
    """Run a router as a plain process."""
    from baton.cli.cluster import serve

    serve.run_router(config, sets or [], log, index)


def gateway(config: ConfigFile = LOCAL, target: Upstream = None, sets: Sets = None, log: Log = None) -> None:
    """Run only OpenAI's HTTP API, at router.http, in front of a router."""
    from baton.cli.cluster import serve

    serve.run_gateway(config, sets or [], target, log)
