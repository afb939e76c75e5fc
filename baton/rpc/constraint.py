"""`baton.constraint.Constraint` on the wire."""

from __future__ import annotations

from baton.constraint import Constraint
from baton.errors import InvalidRequest
from baton.rpc.v1 import inference_pb2 as inference


def constraint_to_pb(value: Constraint | None) -> inference.Constraint | None:
    """None stays None: a field that is not set."""
    if value is None:
        return None
    if value.kind == "choices":
        return inference.Constraint(choices=inference.Choices(texts=value.texts))
    return inference.Constraint(**{value.kind: value.texts[0]})  # type: ignore[arg-type]


def constraint_from_pb(message: inference.Constraint) -> Constraint:
    """Raises InvalidRequest: of no kind, or too large."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest.of("constraint", "one of json_schema, regex and choices must be set")
    if kind == "choices":
        return Constraint(kind, tuple(message.choices.texts))
    return Constraint(kind, (message.json_schema if kind == "json_schema" else message.regex,))
