"""Who holds which blocks of this worker: counted from the tables of the role, and compared with the ledger of its pool.

The ledger says how many blocks are held; the census asks those who should hold them. A block that is held by nobody
whom the role knows is lost to this process, though the ledger adds up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.core import BlockCounts, HandoffId, WorkerRef
from baton.errors import DeadlineExceeded
from baton.rpc import convert
from baton.rpc.v1 import worker_pb2 as pb

if TYPE_CHECKING:
    from baton.worker.engine_loop import EngineLoop


@dataclass(frozen=True, slots=True)
class Holding:
    """What one handoff has here for one reason.

    `state`: at a decode worker reserved, receiving, committed, fenced, decoding, parked (it goes on without a router,
    for some time), or fetched (a prefill worker reads its cached blocks); at a prefill worker fetching, queued,
    prefilling, pushing, or waiting for a repush or a release.
    `router_id`: whose it is; "": nobody's any more.
    """

    handoff: HandoffId
    state: str
    blocks: Sequence[int]
    router_id: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """A holding, counted. Of its `blocks`, `counted` are not counted with an earlier one: shared blocks count once."""

    handoff: HandoffId
    state: str
    router_id: str
    blocks: int
    counted: int


@dataclass(frozen=True, slots=True)
class Census:
    """The ledger of `worker`, and who holds what of it."""

    worker: WorkerRef
    blocks: BlockCounts
    held: tuple[Held, ...]

    @property
    def unaccounted(self) -> int:
        """Blocks that are reserved or owned by the ledger, and nobody holds. Below 0: held, and free by the ledger."""
        return self.blocks.reserved + self.blocks.owned - sum(held.counted for held in self.held)


def count(worker: WorkerRef, blocks: BlockCounts, holdings: Iterable[Holding]) -> Census:
    """Put both together."""
    seen: set[int] = set()
    held = []
    for holding in holdings:
        fresh = set(holding.blocks) - seen
        seen |= fresh
        held.append(Held(holding.handoff, holding.state, holding.router_id, len(holding.blocks), len(fresh)))
    return Census(worker, blocks, tuple(held))


async def take(
    loop: EngineLoop, worker: WorkerRef, holdings: Callable[[], Iterable[Holding]], *, within_s: float = 10.0
) -> Census:
    """A census between two steps. Raises DeadlineExceeded if the engine thread does not come to it in time."""
    answer: Future[Census] = Future()

    def look() -> None:
        if not answer.set_running_or_notify_cancel():
            return  # nobody waits any more
        try:
            answer.set_result(count(worker, loop.engine.pool.counts(), holdings()))
        except Exception as error:  # noqa: BLE001  (the boundary of the thread: it is the asker's, not the engine's)
            answer.set_exception(error)

    loop.submit(look)
    try:
        async with asyncio.timeout(within_s):
            return await asyncio.wrap_future(answer)
    except TimeoutError:
        raise DeadlineExceeded(f"{worker}: no census within {within_s:g} s") from None


def to_pb(census: Census) -> pb.CensusReply:
    """Names are the same on both sides."""
    holdings = [
        pb.Holding(
            handoff=convert.handoff_to_pb(held.handoff),
            state=held.state,
            router_id=held.router_id,
            blocks=held.blocks,
            counted=held.counted,
        )
        for held in census.held
    ]
    worker, blocks = convert.ref_to_pb(census.worker), convert.counts_to_pb(census.blocks)
    return pb.CensusReply(worker=worker, blocks=blocks, holdings=holdings)
