"""A worker's transfer side as a separate process, driven by messages: a receiver or a sender.

The receiver sends {"address": ...} and then answers {"reserve": {...}, "digest": {...}}. The sender pushes on command.
`Process` and `Receiver` start such a process; `Prefill` is a sender and `receiving` a receiver in the
caller's process.
"""

import asyncio
import multiprocessing
import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from baton.core import HandoffId, Incarnation, KVLayout, WorkerRef
from baton.engine.kv_cache import KVCache
from baton.hashing import frame_digest
from baton.rpc.channel import aio_server, bind
from baton.rpc.v1.peer_pb2_grpc import add_PeerServicer_to_server
from kvtransfer.handoff import TransferSettings
from kvtransfer.receiver import PeerService
from kvtransfer.sender import Sender
from kvtransfer.transports.nixl import NixlTransport
from kvtransfer.transports.select import make_transports
from tests.support.time_factor import scaled
from tests.unit.kvtransfer import support
from tests.unit.kvtransfer.support import FINGERPRINT, LAYOUT, P, RecordingTable, Reports

BLOCKS = 64
FORKED = multiprocessing.get_context("forkserver")  # of a process that has imported torch, which takes two seconds


def kv_for(over: str, seed: int | None, layout: KVLayout = LAYOUT) -> KVCache:
    """Return KV that this transport can carry, as `make_kv` does."""
    device = "cuda:0" if over == "cuda_ipc" else "cpu"
    return support.make_kv(seed, BLOCKS, layout, exposed=over not in {"gloo", "nixl"}, device=device)


def kv_digest(kv: KVCache, blocks: Sequence[int], tokens: int, skip: int = 0) -> str:
    """Return the digest of positions [skip, tokens) of all layers, in wire order."""
    layers = range(kv.layout.layers)
    out = torch.empty(len(layers) * (tokens - skip) * kv.layout.layer_token_bytes, dtype=torch.uint8)
    kv.gather(layers, blocks, skip, tokens, out)
    return frame_digest(out.numpy().data).hex()


@dataclass(frozen=True)
class Options:
    """The side of a process. `to`: address of a sender's receiver."""

    over: str = "gloo"
    counter: int = 2
    frame_size: int = 1 << 16
    to: str = ""
    layout: KVLayout = LAYOUT


class Process:
    """A process with one side, which runs `receive` or `send`."""

    def __init__(self, role: str, **options: Any) -> None:
        FORKED.set_forkserver_preload([__name__])  # here, because other modules that are imported set one, too
        self._link, theirs = FORKED.Pipe()
        self.process = FORKED.Process(target=main, args=(role, Options(**options), theirs), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self) -> dict[str, Any]:
        """Return the next message. Raises EOFError if the process has ended."""
        return self._link.recv()

    def tell(self, **command: Any) -> None:
        self._link.send(command)

    def ask(self, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        return self.hear()

    def send_signal(self, number: int) -> None:
        assert self.process.pid
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def stop(self) -> int | None:
        """Let the process end, and return its exit code."""
        self._link.close()
        self.process.join(scaled(20))
        return self.process.exitcode


class Receiver(Process):
    """A decode worker's side. `ref` has its address."""

    def __init__(self, counter: int = 2, **options: Any) -> None:
        super().__init__("receiver", counter=counter, **options)
        self.ref = WorkerRef("decode-0", Incarnation(7, counter), self.hear()["address"])


class Prefill:
    """A sender in this process. After `close` it holds no thread and no descriptor."""

    def __init__(
        self, layout: KVLayout = LAYOUT, deadline_s: float = 5.0, me: WorkerRef = P, over: str = "gloo", **more: Any
    ) -> None:
        self.reports = Reports()
        self.kv = kv_for(over, 1, layout)
        settings = TransferSettings(over, coalesce_below=1, frame_deadline_s=deadline_s, verify_kv=True)
        transports = make_transports(settings, self.kv)
        for transport in transports.transports:
            if isinstance(transport, NixlTransport):
                transport._served[1].where(scaled(30))  # starts a process, which takes longer than a short deadline
        self.sender = Sender(self.kv, me, FINGERPRINT, settings, transports, self.reports, **more)

    def push(
        self, name: str, tokens: int, blocks: Sequence[int], to: WorkerRef, *, chunk: int = 0, skip: int = 0
    ) -> HandoffId:
        """Push a handoff. `chunk`: report each chunk layer by layer, or 0 to report everything in one call."""
        job, layers = support.make_job(name, tokens, to, skip=skip), self.kv.layout.layers
        if not chunk:
            return support.hand_over(self.sender, job, blocks, layers)
        self.sender.begin(job)
        for begin in range(skip, tokens, chunk):
            for layer in range(1, layers + 1):
                self.sender.computed(job.handoff, blocks, layer, min(begin + chunk, tokens))
        self.sender.finish(job.handoff, support.make_end(tokens))
        return job.handoff


@asynccontextmanager
async def receiving(
    kv: KVCache, table: RecordingTable, settings: TransferSettings, counter: int = 2
) -> AsyncIterator[WorkerRef]:
    """Serve a decode worker's side in this process, and yield its reference."""
    server = aio_server()
    me = WorkerRef("decode-0", Incarnation(7, counter), bind(server, "127.0.0.1:0"))
    service = PeerService(kv, me, FINGERPRINT, settings, table, make_transports(settings, kv))
    add_PeerServicer_to_server(service, server)
    await server.start()
    try:
        yield me
    finally:
        await server.stop(0)
        await service.close()


# in the process


async def receive(options: Options, settings: TransferSettings, link: Connection) -> None:
    table, kv = RecordingTable(options.layout), kv_for(options.over, None, options.layout)
    async with receiving(kv, table, settings, options.counter) as me:
        link.send({"address": me.address})
        while True:
            command = await asyncio.to_thread(link.recv)
            for name, blocks in command.get("reserve", {}).items():
                table.reserve(HandoffId(name, 1), blocks)
            answer = {
                "commits": [handoff.request_id for handoff in table.commits],
                "digests": {name: kv_digest(kv, *where) for name, where in command.get("digest", {}).items()},
                "lost": [str(what) for kind, what in table.events if kind == "lost"],
                "threads": sum(thread.name.startswith("kv-") for thread in threading.enumerate()),
            }
            link.send(answer)


def send(options: Options, link: Connection) -> None:
    prefill = Prefill(options.layout, scaled(60.0), over=options.over)  # it is killed before
    to = WorkerRef("decode-0", Incarnation(7, options.counter), options.to)
    try:
        while True:
            command = link.recv()
            prefill.push(command["push"], command["tokens"], command["blocks"], to, chunk=command["tokens"])
    finally:
        prefill.sender.close()


def main(role: str, options: Options, link: Connection) -> None:
    torch.set_num_threads(1)
    settings = TransferSettings(options.over, options.frame_size, frame_deadline_s=scaled(5.0), verify_kv=True)
    with suppress(EOFError):  # the other end of the link is closed
        if role == "receiver":
            asyncio.run(receive(options, settings, link))
        else:
            send(options, link)
