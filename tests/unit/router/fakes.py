"""Links that are up, without a stream, and a fleet of them."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core import Incarnation, KVLayout, Role, WorkerInfo, WorkerRef
from baton.load import BlockCounts, Load, Pace
from router.fleet import Fleet
from router.view import WorkerView

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=8, block_size=16, dtype="float32")


@dataclass(eq=False)
class FakeLink:
    view: WorkerView
    usable: bool = True
    retired: bool = False
    state: str = "connected"

    @property
    def info(self) -> WorkerInfo:
        return self.view.info


def link(
    role: Role, name: str, fingerprint: str = "a", free: int = 100, running: int = 0, reported: int = 0, **fields
) -> FakeLink:
    """`fields` are those of its view; `reported` and `running` are what the worker says of its load, `pace` of steps of
    its own kind, `prompts` and `beside` (decode) of those with prompts and what was decoded in them, `bits` what it
    says of its determinism.
    """
    bits = fields.pop("bits", "")
    ref = WorkerRef(name, Incarnation(1, 1), "x:1")
    blocks = BlockCounts(100, free, 100 - free)
    pace = fields.pop("pace", Pace())
    load = Load(
        step=pace.steps,
        running=running,
        queued_tokens=reported,
        blocks=blocks,
        prefill_pace=pace if role is Role.PREFILL else Pace(),
        decode_pace=pace if role is Role.DECODE else Pace(),
        joint_pace=fields.pop("prompts", Pace()),
        beside_pace=fields.pop("beside", Pace()),
    )
    info = WorkerInfo(ref, role, fingerprint, "m", 2048, 100, LAYOUT, determinism=bits)
    return FakeLink(WorkerView(info, load, **fields))


def prefill(name: str = "p", *args, **fields) -> FakeLink:
    return link(Role.PREFILL, name, *args, **fields)


def decode(name: str = "d", *args, **fields) -> FakeLink:
    return link(Role.DECODE, name, *args, **fields)


def fleet_of(*links: FakeLink, **facts) -> Fleet:
    fleet = Fleet(**facts)
    for one in links:
        fleet.add(one)
    return fleet


def pace(steps: int, tokens: int, context: int, step_s: float = 0.0, token_s: float = 0.0, context_s: float = 0.0):
    """Equal steps of a worker with these costs."""
    return Pace(steps, steps * tokens, steps * context, steps * (step_s + tokens * token_s + context * context_s))
