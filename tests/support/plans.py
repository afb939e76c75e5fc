"""A plan for tests, with defaults for irrelevant fields."""

from baton.control_plane import Plan, PlanAuthor


def first_plan(
    prefill: int, decode: int, *, generation: int = 0, number: int = 0, by: PlanAuthor = "file", reason: str = ""
) -> Plan:
    return Plan(prefill, decode, generation, number, by, reason)
