"""The block census of a worker: blocks counted from the tables of its role, compared with the counts of its block pool.

The pool counts reserved and owned blocks; the role lists which handoff holds which. A block that no handoff holds is
leaked, even if the counts of the pool add up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
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
    """The blocks that one handoff holds for one reason. `router_id` is "" if the handoff has no router any more.

    `state` at a decode worker: reserved, receiving, committed, fenced, decoding, parked (decodes without a router, for
    some time), or fetched (a prefill worker reads its cached blocks). At a prefill worker: fetching, queued,
    prefilling, pushing, or waiting for a retransfer or a release.
    """

    handoff: HandoffId
    state: str
    blocks: Sequence[int]
    router_id: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """A counted holding. `counted` of its `blocks` are not in an earlier holding: shared blocks count once."""

    handoff: HandoffId
    state: str
    router_id: str
    blocks: int
    counted: int


@dataclass(frozen=True, slots=True)
class Census:
    """The block counts of `worker`'s pool, and the handoffs that hold these blocks."""

    worker: WorkerRef
    blocks: BlockCounts
    held: tuple[Held, ...]

    @property
    def unaccounted(self) -> int:
        """Blocks reserved or owned in the pool that no handoff holds. Negative: held blocks are free in the pool."""
        return self.blocks.reserved + self.blocks.owned - sum(held.counted for held in self.held)


def count(worker: WorkerRef, blocks: BlockCounts, holdings: Iterable[Holding]) -> Census:
    """Compare the counts of the pool with the holdings."""
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
    """Take a census between two steps. Raises DeadlineExceeded if the engine thread takes longer than `within_s`."""
    answer = loop.call(lambda: count(worker, loop.engine.pool.counts(), holdings()))
    try:
        async with asyncio.timeout(within_s):
            return await asyncio.wrap_future(answer)
    except TimeoutError:
        raise DeadlineExceeded(f"{worker}: no census within {within_s:g} s") from None


def to_pb(census: Census) -> pb.CensusReply:
    """Convert a census to its message, which has the same fields."""
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
