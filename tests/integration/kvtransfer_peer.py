"""A worker's transfer side as a separate process, driven by lines of JSON: run with `receiver` or `sender`.

The receiver prints {"address": ...} and then answers {"reserve": {...}, "digest": {...}}. The sender pushes on command.
`Process` and `Receiver` start such a process; `Prefill` is a sender and `receiving` a receiver in the
caller's process.
"""

import argparse
import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
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
from tests.support.processes import start_program
from tests.support.time_factor import scaled
from tests.unit.kvtransfer import support
from tests.unit.kvtransfer.support import FINGERPRINT, LAYOUT, P, RecordingTable, Reports

BLOCKS = 64


def kv_for(over: str, seed: int | None, layout: KVLayout = LAYOUT) -> KVCache:
    """Return KV that this transport can carry, as `make_kv` does."""
    device = "cuda:0" if over == "cuda_ipc" else "cpu"
    return support.make_kv(seed, BLOCKS, layout, exposed=over != "gloo", device=device)


def kv_digest(kv: KVCache, blocks: Sequence[int], tokens: int, skip: int = 0) -> str:
    """Return the digest of positions [skip, tokens) of all layers, in wire order."""
    layers = range(kv.layout.layers)
    out = torch.empty(len(layers) * (tokens - skip) * kv.layout.layer_token_bytes, dtype=torch.uint8)
    kv.gather(layers, blocks, skip, tokens, out)
    return frame_digest(out.numpy().data).hex()


class Process:
    """A process that runs this program."""

    def __init__(self, role: str, *flags: str, layout: KVLayout = LAYOUT) -> None:
        self.process = start_program(__name__, role, "--layout", json.dumps(asdict(layout)), *flags)

    def hear(self) -> dict:
        """Return the next message. Skips log lines."""
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError("the process ended")

    def tell(self, **command) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def ask(self, **command) -> dict:
        self.tell(**command)
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        assert self.process.stdin
        self.process.stdin.close()
        return self.process.wait(scaled(20))


class Receiver(Process):
    """A decode worker's side. `ref` has its address."""

    def __init__(self, *flags: str, counter: int = 2, layout: KVLayout = LAYOUT) -> None:
        super().__init__("receiver", "--counter", str(counter), *flags, layout=layout)
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
            if isinstance(transport, NixlTransport) and (exposed := transport._exposed) is not None:
                exposed.where(scaled(30))  # starts a process, which takes longer than a short deadline
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


def layout_of(text: str) -> KVLayout:
    fields = json.loads(text)
    return KVLayout(**{**fields, "tensors": tuple(fields["tensors"])})


def say(**message) -> None:
    print(json.dumps(message), flush=True)


async def receive(arguments: argparse.Namespace, settings: TransferSettings) -> None:
    table, kv = RecordingTable(arguments.layout), kv_for(arguments.over, None, arguments.layout)
    async with receiving(kv, table, settings, arguments.counter) as me:
        say(address=me.address)
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            for name, blocks in command.get("reserve", {}).items():
                table.reserve(HandoffId(name, 1), blocks)
            say(
                commits=[handoff.request_id for handoff in table.commits],
                digests={name: kv_digest(kv, *where) for name, where in command.get("digest", {}).items()},
                lost=[str(what) for kind, what in table.events if kind == "lost"],
                threads=sum(thread.name.startswith("kv-") for thread in threading.enumerate()),
            )


def send(arguments: argparse.Namespace) -> None:
    prefill = Prefill(arguments.layout, scaled(5.0), over=arguments.over)
    to = WorkerRef("decode-0", Incarnation(7, arguments.counter), arguments.to)
    for line in sys.stdin:
        command = json.loads(line)
        prefill.push(command["push"], command["tokens"], command["blocks"], to, chunk=command["tokens"])
    prefill.sender.close()


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("receiver", "sender"))
    parser.add_argument("--over", default="gloo")
    parser.add_argument("--counter", type=int, default=2)
    parser.add_argument("--frame-size", type=int, default=1 << 16)
    parser.add_argument("--to", default="")
    parser.add_argument("--layout", type=layout_of, required=True)
    arguments = parser.parse_args()
    settings = TransferSettings(arguments.over, arguments.frame_size, frame_deadline_s=scaled(5.0), verify_kv=True)
    if arguments.role == "receiver":
        asyncio.run(receive(arguments, settings))
    else:
        send(arguments)


if __name__ == "__main__":
    main()
