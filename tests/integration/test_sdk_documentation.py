"""Examples that run: those of the SDK's docstrings, those of docs/how-to/clients.md, and the Node.js client."""

import asyncio
import doctest
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

import baton.client.aio
import baton.client.sync
from baton import Client
from tests.support.clients import Scripted, serving, soon
from tests.support.waiting import until

PAGE = Path(__file__).parents[2] / "docs/how-to/clients.md"
MODULES = [baton.client.aio, baton.client.sync]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
async def test_the_examples_of_the_docstrings_say_what_happens(module: Any):
    async with serving(Scripted()) as scripted:
        names = vars(baton) | {"target": scripted.address, "Client": Client}
        tests = [test for test in doctest.DocTestFinder().find(module, globs=names) if test.examples]
        assert tests
        for test in tests:
            result = await soon(asyncio.to_thread(doctest.DocTestRunner().run, test))
            assert (result.failed, result.attempted > 1) == (0, True), test.name


def page_examples() -> list[str]:
    """Return the Python blocks of the section on the SDK."""
    section = PAGE.read_text().split("\n## SDK\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(page_examples())))
async def test_the_examples_of_the_page_run(number: int, capsys: pytest.CaptureFixture[str]):
    code = page_examples()[number]
    async with serving(Scripted()) as scripted:
        here = re.sub(r"127\.0\.0\.1:\d+(,127\.0\.0\.1:\d+)*", scripted.address, code)
        assert here != code
        await soon(asyncio.to_thread(exec, compile(here, PAGE.name, "exec"), {}))
    assert " can vary widely" in capsys.readouterr().out


# --- the Node.js example client: other languages need only the proto files

EXAMPLE = Path(__file__).parents[2] / "examples" / "node"
INSTALL_S = 45


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


@pytest.mark.slow
async def test_an_answer_and_errors(modules: Path, make: Any):
    router = (await make()).router.grpc
    code, out, _ = await ended(await start(modules, router, "1 2 3", "4"))
    assert (code, out.startswith("<0><1><2><3>!\n")) == (0, True)
    assert out.endswith(" prompt tokens, 4 new ones\n")
    code, _, err = await ended(await start(modules, router, "1 2 3", "-1"))
    assert (code, "INVALID_ARGUMENT" in err, "max_tokens" in err) == (2, True, True)
    assert (await ended(await start(modules, "127.0.0.1:1", "x")))[0] == 4
    assert (await ended(await start(modules)))[0] == 2


@pytest.mark.slow
async def test_leaving_cancels_the_request(modules: Path, cluster: Any):
    cluster.decode[0].gates["decode"].clear()
    process = await start(modules, cluster.router.grpc, "1 2 3", "4")
    assert process.stdout is not None
    assert await soon(process.stdout.readexactly(3)) == b"<0>"
    process.send_signal(signal.SIGINT)
    code, _, err = await ended(process)
    assert (code, "CANCELLED" in err) == (130, True)
    await until(lambda: cluster.idle, "the router has let go of the request")
