"""A browser for each module, and pages of a router whose scripted workers run in a separate thread.

No page may send a request to another host or raise an error.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from router.openai.responses import as_json
from tests.support.in_process_router import clusters
from tests.support.time_factor import scaled
from tools.browser import chromium, executable

WITHIN_MS = scaled(30_000)
EVERY_S = 20  # seconds between two views of a test
expect.set_options(timeout=WITHIN_MS)
HARMLESS = ("Failed to load resource",)  # Chromium's message for a status above 399; the tests check these themselves


class Beside:
    """A loop in a separate thread, for routers and scripted workers."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="beside")
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(scaled(60))

    def soon(self, call: Any, *args: Any) -> None:
        self._loop.call_soon_threadsafe(call, *args)

    def release(self, workers: Any) -> None:
        """Open all gates of these scripted workers."""
        for gate in (gate for worker in workers for gate in worker.gates.values()):
            self.soon(gate.set)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def browser():
    """A browser for one module, because Playwright's loop runs in this thread, and other tests have their own."""
    path = executable()
    if path is None:
        pytest.skip("no Chromium here: none on PATH, and BATON_CHROMIUM names none")
    with chromium(path) as found:
        yield found


@pytest.fixture
def beside():
    made = Beside()
    yield made
    made.close()


@pytest.fixture
def build(beside):
    """Starts a router with a gateway and scripted workers."""
    held = clusters()
    make = beside.run(held.__aenter__())
    yield lambda **settings: beside.run(make(**{"http": "127.0.0.1:0", **settings}))
    beside.run(held.__aexit__(None, None, None))


@pytest.fixture
def cluster(build):
    return build()


@pytest.fixture
def fed(tab, cluster, beside):
    """`fed(change, ...)`: a page that received the router's current view with each change in turn."""

    async def now() -> Any:
        async for found in cluster.router._admin.live.watch(1):
            return found

    def opened(*changes: Callable[[dict[str, Any]], None]) -> Any:
        page = tab(cluster.router.http)
        (found, happenings), views = beside.run(now()), []
        said = {**as_json(found), "happenings": [as_json(one) for one in happenings]}
        for change in changes:
            said["time_s"] += EVERY_S
            change(said)
            views.append(f"data: {json.dumps(said)}\n\n")
        page.route("**/live?*", lambda route: route.fulfill(content_type="text/event-stream", body="".join(views)))
        page.reload()
        return page

    return opened


@pytest.fixture
def tab(browser):
    """Opens pages: `tab(address, ...)`, with options of the browser's context."""
    contexts, asked, errors, addresses = [], [], [], set()

    def opened(address: str, *, path: str = "/", **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        context.set_default_timeout(WITHIN_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text if message.type == "error" else ""))
        addresses.add(address)
        page.goto(f"http://{address}{path}")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert {urlsplit(url).netloc for url in asked} == addresses, "asked of another host"
    assert [error for error in errors if error and not error.startswith(HARMLESS)] == []


@pytest.fixture
def page(tab, cluster):
    """The page of `cluster`'s router, connected."""
    found = tab(cluster.router.http)
    expect(found.locator("#status")).to_have_text("live")
    return found
