"""Cost of any streamed gRPC call on this machine: a server that answers immediately."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import uvloop

from baton.rpc.channel import PUBLIC, aio_server, bind
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from benchmarks.lib.protocol import ROOT


class Bare(InferenceServicer):
    """Sends one token and ends."""

    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Send two messages, as short as those of a real answer."""
        await context.write(pb.GenerateEvent(request_id="bare", tokens=pb.Tokens(ids=[1], text="a")))
        await context.write(pb.GenerateEvent(request_id="bare", seq=1, completed=pb.Completed()))


@contextlib.contextmanager
def bare_server() -> Iterator[str]:
    """Run the server in a separate process and yield its address."""
    argv = [sys.executable, "-m", "benchmarks.lib.bare_call"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate()


async def serve() -> None:
    """Serve until the process is ended."""
    server = aio_server(link=PUBLIC)
    add_InferenceServicer_to_server(Bare(), server)  # type: ignore[abstract]
    address = bind(server, "127.0.0.1:0")
    await server.start()
    print(address, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve())
