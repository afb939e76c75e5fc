"""The examples in the SDK's docstrings and in docs/how-to/clients.md run."""

import asyncio
import doctest
import re
from pathlib import Path
from typing import Any

import pytest

import baton.client.aio
import baton.client.sync
from baton import Client
from tests.support.clients import Scripted, serving, soon

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
