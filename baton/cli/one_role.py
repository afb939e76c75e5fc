"""`baton prefill-worker | decode-worker | router | gateway`: one role as a plain process, and its options."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli.options import LOCAL, ConfigFile, Index, Log, RouterIndex, Sets, WorkerId
from baton.core import Role


def prefill_worker(
    config: ConfigFile = LOCAL, index: Index = 0, sets: Sets = None, log: Log = None, worker_id: WorkerId = None
) -> None:
    """Run a worker as a plain process. It prefills until the cluster's controller has it decode."""
    from baton.cli import roles

    roles.run_role(Role.PREFILL, config, sets or [], worker_id or f"prefill-{index}", log)


def decode_worker(
    config: ConfigFile = LOCAL, index: Index = 0, sets: Sets = None, log: Log = None, worker_id: WorkerId = None
) -> None:
    """Run a worker as a plain process. It decodes until the cluster's controller has it prefill."""
    from baton.cli import roles

    roles.run_role(Role.DECODE, config, sets or [], worker_id or f"decode-{index}", log)


def router(config: ConfigFile = LOCAL, index: RouterIndex = 0, sets: Sets = None, log: Log = None) -> None:
    """Run a router as a plain process."""
    from baton.cli import roles

    roles.run_router(config, sets or [], log, index)


def gateway(
    config: ConfigFile = LOCAL,
    target: Annotated[str | None, typer.Option("--target", help="a router's host:port (default: router.grpc)")] = None,
    sets: Sets = None,
    log: Log = None,
) -> None:
    """Run OpenAI's HTTP API alone, on router.http, in front of a router."""
    from baton.cli import roles

    roles.run_gateway(config, sets or [], target, log)
