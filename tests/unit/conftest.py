import asyncio

import pytest
import torch

from baton.metrics import MetricsServer


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Give each test process one thread, before any other fixture computes. Single tests set more."""
    torch.set_num_threads(1)


@pytest.fixture
def threads(request):
    """Set torch's number of threads, and return it."""
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.fixture
async def listen():
    """A function that serves metrics over HTTP. It returns a function that sends a request and returns the answer."""
    servers = []

    async def start(registry, **options):
        servers.append(MetricsServer(registry, **options))
        address = await servers[-1].start("127.0.0.1:0")

        async def ask(request: bytes) -> str:
            reader, writer = await asyncio.open_connection(*address.split(":"))
            writer.write(request + b"\r\nHost: x\r\n\r\n")
            answer = (await reader.read()).decode()
            writer.close()
            return answer

        return ask

    yield start
    for server in servers:
        await server.stop()
