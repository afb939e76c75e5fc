"""Spans between protobuf and our type; see `baton.rpc.convert`."""

from __future__ import annotations

from baton.rpc.v1 import common_pb2 as common
from baton.tracing.span import Span


def span_from_pb(message: common.Span) -> Span:
    """What a router says of a request."""
    return Span(
        message.name,
        message.process,
        message.role,
        message.start_s,
        message.duration_s,
        dict(message.attributes),
        message.attempt,
        message.choice,
    )
