"""Connected links without streams; fleets, pools and contexts of them; entries of the prefix directory.

Also admissions whose capacity tests change, and ways to let other tasks run: in turns of the loop or virtual time.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import pytest

from baton.clock import Clock
from baton.core import BlockCounts, Incarnation, KVLayout, Load, Pace, Role, WorkerInfo, WorkerRef
from baton.engine.prefix_cache import BlockHashChain, scope_key
from baton.errors import Overloaded
from baton.ledger.prefix_index import NAME_BYTES, Change, Holder, PrefixIndex
from baton.testing import FakeClock
from router.admission.admission import Admission, QueueLimits, ticket_for
from router.context import RouterContext, RouterSettings, build_context
from router.placement.fleet import Fleet
from router.placement.policy import POLICIES
from router.placement.snapshot import BLANK, WorkerView
from router.workers.placement import Placement
from router.workers.pool import WorkerPool
from router.workers.stream import WorkerStream
from tests.simulation.clock import VirtualLoop

BUSY = BLANK._replace(  # a decode worker with work of all kinds
    able=1.0, requests=4.0, capacity=1e6, kv_tokens=1000.0, step_s=0.008, token_s=0.0005, context_s=1e-6,
    queued_s=0.0002, prompt_step_s=0.002, prompt_token_s=0.0001, prompt_context_s=1e-7,
)  # fmt: skip
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=8, block_size=16, dtype="float32")
Result = TypeVar("Result")


def predicted_ttft_s(placement: Placement) -> float | None:
    """Return the prediction to compare with the first token, or None if there is none."""
    return placement.on_first.args[0] if isinstance(placement.on_first, partial) else None


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
    """`fields` set its view. The worker's load has `reported`, `running` and three paces: `pace` of steps of its own
    kind, `prompts` of joint steps, and `beside` of the decoding in these. `bits` is its determinism fingerprint.
    """
    bits = fields.pop("bits", "")
    ref = WorkerRef(name, Incarnation(1, 1), "x:1")
    blocks = BlockCounts(100, free, 100 - free)
    pace = fields.pop("pace", Pace())
    paces = {
        f"{role}_pace": pace,
        "joint_pace": fields.pop("prompts", Pace()),
        "beside_pace": fields.pop("beside", Pace()),
    }
    load = Load(step=pace.steps, running=running, queued_tokens=reported, blocks=blocks, **paces)
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


def pace(steps: int, tokens: int, context: int, step_s: float = 0.0, token_s: float = 0.0):
    """Return the pace of equal steps with these costs."""
    return Pace(steps, steps * tokens, steps * context, steps * (step_s + tokens * token_s))


def block_names(tokens: Sequence[int], count: int, fingerprint: str = "a", *, size: int = 16, marked=False):
    """Return the hashes of the first `count` blocks. `marked`: as for deterministic requests."""
    chain = BlockHashChain(scope_key(fingerprint, "", marked), tokens, size)
    return [chain.digest(block)[:NAME_BYTES] for block in range(count)]


def holder(one: FakeLink) -> Holder:
    return Holder(one.info.ref.worker_id, one.info.ref.incarnation)


def publish(prefixes: PrefixIndex, one: FakeLink, names: list[bytes], seq: int = 1) -> None:
    """Set the blocks that the directory lists for this worker."""
    prefixes.apply(Change(holder(one), seq, True, names))


async def no_workers() -> list[WorkerInfo]:
    return []


def pool_of(*links: FakeLink, policy: str = "least_loaded", clock: FakeClock | None = None, **facts: Any) -> WorkerPool:
    pool = WorkerPool(no_workers, POLICIES[policy], "router-a", 1.0, clock or FakeClock(), **facts)
    for one in links:
        pool._add(cast("WorkerStream", one))
    return pool


def floor_of(*links: FakeLink, **settings: Any) -> RouterContext:
    context = build_context(RouterSettings(name="c", model="m", **settings), no_workers, FakeClock())
    for one in links:
        context.pool._add(cast("WorkerStream", one))
    return context


def named(pool: WorkerPool, name: str) -> Any:
    return next(link for link in pool.links if link.info.ref.worker_id == name)


def say(pool: WorkerPool, name: str, *, report: dict[str, Any] | None = None, **facts: Any) -> None:
    """Set fields of the worker's view or link. `report` changes fields of its load."""
    one = named(pool, name)
    if report:
        facts["load"] = replace(one.view.load, **report)
    for field, value in facts.items():
        setattr(one.view if hasattr(one.view, field) else one, field, value)
    pool._changed(one.info.ref)


def pair_of(placement: Any) -> tuple[str, str]:
    return placement.prefill.info.ref.worker_id, placement.decode.info.ref.worker_id


def in_virtual_time(scenario: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(scenario)


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Decorate a test that runs in virtual time."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        in_virtual_time(test(*args, **kwargs))

    return run


async def turns() -> None:
    """Let other tasks run until each waits."""
    for _ in range(8):
        await asyncio.sleep(0)


class Gate:
    """An admission with capacity for `room` requests or tokens. `pair`: a worker that could serve is connected."""

    def __init__(
        self,
        room: int = 0,
        *,
        by_tokens: bool = False,
        pair: bool = True,
        clock: Clock | None = None,
        weights: dict[str, float] | None = None,
        **bounds: Any,
    ) -> None:
        self.room, self.pair, self.arrivals, self.starting = room, pair, 0, ""
        self.clock = clock or FakeClock()
        self.wishes: list[object] = []  # requirements of each placement attempt
        self.tasks: list[asyncio.Task[int]] = []
        self._by_tokens = by_tokens
        limits = QueueLimits(**{"requests": 1000, "tokens": 100_000, "wait_s": 30.0, **bounds})
        self.admission = Admission(self.placement, self.give_back, lambda: self.pair, self.clock, limits, weights)
        self.admission.starting = lambda: self.starting

    def placement(self, tokens: int, requirements: object) -> int | None:
        self.wishes.append(requirements)
        needs = tokens if self._by_tokens else 1
        if needs > self.room:
            return None
        self.room -= needs
        return tokens

    def give_back(self, placement: int) -> None:
        self.free(placement if self._by_tokens else 1)

    def free(self, more: int = 1) -> None:
        self.room += more
        self.admission.changed()

    async def enter(self, tokens: int = 10, priority: int = 0, arrival: int | None = None, **kwargs: Any) -> Any:
        """Start a request. Return its task if it waits, else its placement, or raise its error."""
        self.arrivals += 1
        ticket = ticket_for(self.arrivals if arrival is None else arrival, priority)
        task = asyncio.create_task(self.admission.admit(ticket, tokens, **kwargs))
        await asyncio.sleep(0)  # one turn of the loop: the task runs up to its first wait
        if task.done():
            return task.result()
        self.tasks.append(task)
        return task

    async def enter_all(self, count: int, **kwargs: Any) -> list[Any]:
        return [await self.enter(**kwargs) for _ in range(count)]

    async def refuses(self, match: str | None = None, **kwargs: Any) -> float:
        """Expect an immediate rejection. Return the delay that the client receives."""
        with pytest.raises(Overloaded, match=match) as caught:
            await self.enter(**kwargs)
        return caught.value.retry_after_s

    async def drain(self, times: int, per_s: float) -> None:
        for _ in range(times):
            self.clock.advance(1 / per_s)  # type: ignore[attr-defined]
            self.free()
        await asyncio.sleep(0)

    async def measured(self, per_s: float = 10.0) -> None:
        """Serve ten requests of ten tokens per second. Afterwards no request waits."""
        await self.enter_all(21)
        await self.drain(21, per_s)
        assert self.admission.waiting == 0

    async def cleared(self) -> None:
        """Cancel all waiting requests and check that none is left in the queue."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert (self.admission.waiting, self.admission.waiting_tokens) == (0, 0)
