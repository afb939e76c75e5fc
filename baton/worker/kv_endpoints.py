"""A worker's endpoints for KV, built the same for both roles: sender, receiver, and publisher of cached prefixes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Protocol

from baton.ledger.prefix_directory import PrefixPublisher
from baton.rpc.v1 import peer_pb2_grpc
from kvtransfer.receiver import PeerService
from kvtransfer.sender import GrpcPeerStream, Sender
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.select import make_transports

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.core import HandoffId
    from baton.errors import HandoffError
    from baton.worker.role import RoleDeps
    from kvtransfer.handoff import HandoffTable, PushEnd, PushJob, PushResult


class Pusher(Protocol):
    """The part of `kvtransfer.sender.Sender` that the roles use."""

    def begin(self, job: PushJob) -> None: ...

    def computed(self, handoff: HandoffId, blocks: Sequence[int], layers: int, end: int) -> None: ...

    def withdraw(self, handoff: HandoffId) -> None: ...

    def finish(self, handoff: HandoffId, end: PushEnd) -> None: ...

    def abort(self, handoff: HandoffId) -> None: ...


class Transfers:
    """`sender` pushes KV; `table` accepts or rejects pushes to here. Raises ConfigError if the transport is missing."""

    def __init__(
        self,
        parts: RoleDeps,
        table: HandoffTable,
        on_done: Callable[[HandoffId, PushResult | HandoffError], None],
        on_unfetched: Callable[[HandoffId], None] = lambda handoff: None,
    ) -> None:
        info, kv, settings = parts.info, parts.engine.kv, parts.settings.transfer
        grpc = GrpcTransport(info.ref.address, parts.wire.sync)
        transports = make_transports(settings, kv.device, grpc=grpc)
        ends = (kv, info.ref, info.fingerprint, settings)
        connect = partial(GrpcPeerStream, dial=parts.wire.sync)
        self.sender = Sender(*ends, transports, on_done, on_unfetched=on_unfetched, connect=connect)
        self._peers = PeerService(*ends, table, transports, grpc)
        peer_pb2_grpc.add_PeerServicer_to_server(self._peers, parts.server)
        self._directory = PrefixPublisher(parts.ledger, info.ref)
        parts.engine.pool.on_index = self._directory.note

    async def close(self) -> None:
        """Close all channels, end every push, and stop publishing."""
        await asyncio.to_thread(self.sender.close)
        await self._peers.close()
        await self._directory.close()
