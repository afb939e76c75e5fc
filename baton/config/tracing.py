"""The part of the cluster file about traces."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from baton.config.security import Section


class TracingConfig(Section):
    """Where the time of each request went, in all processes: a router keeps it, and exports it if it is told where."""

    otlp: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s/]+:\d+$",
        description="an OpenTelemetry collector's gRPC address, such as http://127.0.0.1:4317; none: no export",
    )
    sample: float = Field(
        default=1.0, ge=0, le=1, description="the share that is exported; a caller's `traceparent` says for its own"
    )
    keep: Annotated[int, Field(ge=0, le=10_000)] = Field(
        default=512, description="requests that ended last, whose spans each router keeps for `baton trace`"
    )
