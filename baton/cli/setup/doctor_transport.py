"""`baton doctor --transport NAME`: opens and probes a data channel between two processes of this machine."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from baton.cluster.gpus import VISIBLE, visible_gpus
from baton.core import Channel, HandoffId, Incarnation, KVLayout, WorkerRef
from baton.engine.kernels.gpu.cuda_memory import can_expose
from baton.engine.kv_cache import KVCache, exposed_memory
from baton.errors import BatonError, ChannelBroken, OfferRefused, StaleAttempt
from baton.logs import configure_logging
from baton.rpc import channel
from baton.rpc.v1 import peer_pb2_grpc
from baton.worker.engine_factory import pick_device
from kvtransfer.handoff import CommitState, Offer, PushJob, TransferSettings
from kvtransfer.receiver import PeerService
from kvtransfer.sender import Sender
from kvtransfer.transports.base import Choice
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.select import make_transports

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=8, block_size=16, dtype="float32")
SENDER, RECEIVER = Incarnation(1, 1), Incarnation(1, 2)
START_S = 60.0


class _NoReservations:
    """A reservation table without reservations, because only the channel is needed."""

    def offer(self, handoff: HandoffId, sender: WorkerRef, offer: Offer) -> None:
        raise StaleAttempt("nothing is reserved here")

    def fetch(self, handoff: HandoffId, sender: WorkerRef, begin: int, end: int, *, verify: bool = False) -> None:
        raise OfferRefused("no KV is here")

    def writing(self, handoff: HandoffId, sender: WorkerRef) -> AbstractContextManager[Sequence[int]]:
        raise StaleAttempt("nothing is reserved here")

    def commit(self, handoff: HandoffId, sender: WorkerRef, commit: CommitState) -> None:
        raise StaleAttempt("nothing is reserved here")

    def aborted(self, handoff: HandoffId, sender: WorkerRef) -> None: ...

    def lost(self, sender: WorkerRef) -> None: ...


def usable(settings: TransferSettings) -> Choice:
    """Return the transports of a prefill worker with KV in main memory here. Raises ConfigError."""
    return make_transports(settings, _cache(torch.device("cpu")), grpc=GrpcTransport())


def probe_pair(transport: str, settings: TransferSettings, devices: tuple[str, str]) -> Channel:
    """Probe a channel between KV caches on two devices, one in another process. Its `left_out` has all transports that
    `auto` leaves out here. Raises ConfigError, ChannelBroken.
    """
    deadline_s = min(settings.frame_deadline_s, START_S / 2)
    settings = replace(settings, transport=transport, frame_deadline_s=deadline_s)
    for device in devices:
        pick_device(device)
    configure_logging("error", "auto")
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_receive, args=(there, settings, devices[1]))
    process.start()
    there.close()
    try:
        address = _address_from(here)
        return _send(settings, torch.device(devices[0]), WorkerRef("receiver", RECEIVER, address))
    finally:
        here.close()  # makes the other process end
        process.join(START_S)


def _address_from(here: Connection) -> str:
    if not here.poll(START_S):
        raise ChannelBroken(f"the receiving process sent nothing within {START_S:g} s")
    try:
        answer = here.recv_bytes().decode()
    except EOFError:
        raise ChannelBroken("the receiving process died") from None
    if not answer.startswith("+"):
        raise ChannelBroken(answer)
    return answer.removeprefix("+")


def _cache(device: torch.device) -> KVCache:
    """Return a cache of one block, which another process can read if this system supports that."""
    exposed = exposed_memory(LAYOUT, 1, device) if can_expose(device) else None
    return KVCache(LAYOUT, 1, device, exposed=exposed)


def _send(settings: TransferSettings, device: torch.device, to: WorkerRef) -> Channel:
    ended, outcome = threading.Event(), list[object]()

    def done(handoff: HandoffId, result: object) -> None:
        outcome.append(result)
        ended.set()

    kv = _cache(device)
    found = make_transports(settings, kv, grpc=GrpcTransport())
    me = WorkerRef("sender", SENDER, "nowhere:0")
    with closing(Sender(kv, me, "doctor", settings, found, done)) as sender:
        sender.begin(PushJob(HandoffId("doctor", 1), to, 1))
        ended.wait(START_S)
        opened = sender.channels()
    if not opened or not isinstance(outcome[0], StaleAttempt):
        raise ChannelBroken(str(outcome[0]) if outcome else f"nothing happened within {START_S:g} s")
    known = {one.transport for one in opened[0].left_out}
    worse = (one for one in found.left_out if one.transport not in known)
    return replace(opened[0], left_out=(*opened[0].left_out, *worse))


def own_gpu(device: str, environ: MutableMapping[str, str]) -> str:
    """Hide all GPUs but that of `cuda:N`, as in a worker, and return its name then. Call it before CUDA starts."""
    if not device.startswith("cuda:"):
        return device
    index = int(device[5:])
    environ[VISIBLE] = visible_gpus(index + 1, environ)[index]
    return "cuda:0"


def _receive(there: Connection, settings: TransferSettings, device: str) -> None:
    configure_logging("error", "auto")
    try:
        asyncio.run(_serve(there, settings, torch.device(own_gpu(device, os.environ))))
    except BatonError as error:
        there.send_bytes(str(error).encode())


async def _serve(there: Connection, settings: TransferSettings, device: torch.device) -> None:
    server = channel.aio_server()
    me = WorkerRef("receiver", RECEIVER, channel.bind(server, f"{settings.bind_host}:0"))
    grpc = GrpcTransport(me.address)
    kv, table = _cache(device), _NoReservations()
    peers = PeerService(kv, me, "doctor", settings, table, make_transports(settings, kv, grpc=grpc), grpc)
    peer_pb2_grpc.add_PeerServicer_to_server(peers, server)
    await server.start()
    there.send_bytes(f"+{me.address}".encode())  # an error has no plus sign
    with suppress(EOFError, OSError):
        await asyncio.to_thread(there.recv_bytes)  # until the other process closes the pipe
    await server.stop(None)
    await peers.close()
