"""What an exporter is given: a request that is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.tracing.context import TraceContext
from baton.tracing.span import Span


@dataclass(frozen=True, slots=True)
class Ended:
    """Times in Unix seconds. `error`: the name of its class; "": none. `spans` are made when they are asked for."""

    request_id: str
    router_id: str
    context: TraceContext
    began_s: float
    ended_s: float
    outcome: str
    error: str
    spans: Callable[[], Sequence[Span]]
