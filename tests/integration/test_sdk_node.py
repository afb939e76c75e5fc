"""The Node.js example client against a real router: other languages need only the proto files."""

import asyncio
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients import soon
from tests.support.waiting import until

EXAMPLE = Path(__file__).parents[2] / "examples" / "node"
INSTALL_S = 45
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of the example, in the test's own folder."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("needs node and npm")
    folder = tmp_path_factory.mktemp("node")
    shutil.copy(EXAMPLE / "package.json", folder)
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=1", "--prefer-offline"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not get the packages within {INSTALL_S} s")
    if done.returncode:
        pytest.skip(f"npm cannot get the packages: {done.stderr[-500:]}")
    return folder / "node_modules"


async def start(modules: Path, *args: str) -> asyncio.subprocess.Process:
    env, streams = {**os.environ, "NODE_PATH": str(modules), "BATON_TOKEN": "secret"}, asyncio.subprocess.PIPE
    command = ("node", str(EXAMPLE / "client.js"), *args)
    return await asyncio.create_subprocess_exec(*command, env=env, stdout=streams, stderr=streams)


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    out, err = await soon(process.communicate())
    return process.returncode, out.decode(), err.decode()


async def test_an_answer_and_errors(modules: Path, make: Any):
    router = (await make()).router.grpc
    code, out, _ = await ended(await start(modules, router, "1 2 3", "4"))
    assert (code, out.startswith("<0><1><2><3>!\n")) == (0, True)
    assert out.endswith(" prompt tokens, 4 new ones\n")
    code, _, err = await ended(await start(modules, router, "1 2 3", "0"))
    assert (code, "INVALID_ARGUMENT" in err, "max_tokens" in err) == (2, True, True)
    assert (await ended(await start(modules, "127.0.0.1:1", "x")))[0] == 4
    assert (await ended(await start(modules)))[0] == 2


async def test_leaving_cancels_the_request(modules: Path, cluster: Any):
    cluster.decode[0].gates["decode"].clear()
    process = await start(modules, cluster.router.grpc, "1 2 3", "4")
    assert process.stdout is not None
    assert await soon(process.stdout.readexactly(3)) == b"<0>"
    process.send_signal(signal.SIGINT)
    code, _, err = await ended(process)
    assert (code, "CANCELLED" in err) == (130, True)
    await until(lambda: cluster.idle, "the router has let go of the request")
