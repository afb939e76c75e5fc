import asyncio

import pytest
import torch

from baton.engine.kernels.cpu.compiler import LEVEL_VARIABLE, cpu_level
from baton.metrics import MetricsServer


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Give each test one thread, before its fixtures compute. Single tests and the engines that they build set more."""
    torch.set_num_threads(1)


@pytest.fixture
def threads(request):
    """Set torch's number of threads, and return it."""
    torch.set_num_threads(request.param)
    return request.param


@pytest.fixture(scope="module")
def level(request):
    """Set the level of instructions of compiled kernels, and return it."""
    if cpu_level() == "none":
        pytest.skip(f"{LEVEL_VARIABLE}=none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LEVEL_VARIABLE, request.param)
        yield request.param


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
