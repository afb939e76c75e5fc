"""Scripted servicers on loopback as routers and workers."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from baton.rpc.v1 import admin_pb2_grpc, worker_pb2_grpc
from tests.support.clients import QuietAdmin


@pytest.fixture
def serve() -> Iterator[Callable[[QuietAdmin], str]]:
    """A function that serves a router, or a router that is also a worker. Returns its address."""
    servers: list[grpc.Server] = []

    def served(servicer: QuietAdmin) -> str:
        server = grpc.server(ThreadPoolExecutor(4))
        servers.append(server)
        admin_pb2_grpc.add_AdminServicer_to_server(servicer, server)
        if isinstance(servicer, worker_pb2_grpc.WorkerServicer):
            worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        return address

    yield served
    for server in servers:
        server.stop(None).wait()
