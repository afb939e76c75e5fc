"""The plan of a cluster and the slots of its workers: rows of the control state in Redis, and values of the SDK."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

from baton.core import Role

MAX_TEXT = 1024  # characters of a text in the control state


class Limits:
    """Limits of a field in pydantic's terms, and its value in a row without it. The SDK works without pydantic."""

    def __init__(self, default: object = None, **limits: object) -> None:
        self._default, self._limits = default, limits

    def __get_pydantic_core_schema__(self, source: object, handler: Callable[[object], dict[str, Any]]) -> Any:
        schema = handler(source) | self._limits
        return schema if self._default is None else {"type": "default", "schema": schema, "default": self._default}


Count: TypeAlias = Annotated[int, Limits(ge=0, le=2**53 - 1)]
Number: TypeAlias = Annotated[float, Limits(ge=0, allow_inf_nan=False)]
Text: TypeAlias = Annotated[str, Limits(max_length=MAX_TEXT)]
Id: TypeAlias = Annotated[str, Limits(min_length=1, max_length=256)]
RoleName: TypeAlias = Annotated[str, Limits(pattern=f"^({'|'.join(Role)})$")]

PlanAuthor: TypeAlias = Literal["file", "operator", "autoscaler"]
SlotState: TypeAlias = Literal["starting", "ready", "turning", "draining", "failed"]
DecisionKind: TypeAlias = Literal["plan", "start", "turn", "drain", "end", "replace", "give_up"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Target of a cluster. Workers of an older generation are replaced, one after the other."""

    prefill: Count
    decode: Count
    generation: Annotated[Count, Limits(0)]
    number: Annotated[Count, Limits(0)]
    by: Annotated[PlanAuthor, Limits("file")]
    reason: Annotated[Text, Limits("")]


@dataclass(frozen=True, slots=True)
class Slot:
    """A worker's slot in the controller's report. `role` is the planned role."""

    worker_id: Id
    role: RoleName
    state: SlotState
    generation: Annotated[Count, Limits(0)]
    restarts: Annotated[Count, Limits(0)]
    note: Annotated[Text, Limits("")]


def next_plan(plan: Plan, sizes: Mapping[Role, int], by: PlanAuthor, reason: str) -> Plan:
    """Return the plan after `plan`. A role without a size keeps its own."""
    prefill, decode = (sizes.get(role, pool_size(plan, role)) for role in (Role.PREFILL, Role.DECODE))
    return replace(plan, prefill=prefill, decode=decode, number=plan.number + 1, by=by, reason=reason)


def pool_size(plan: Plan, role: Role) -> int:
    """Return the planned number of workers of a role."""
    return plan.prefill if role is Role.PREFILL else plan.decode
