"""The channels of both clients: made once, on first use, and not after closing."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.client import _wire_aio, _wire_sync
from baton.errors import Cancelled
from baton.rpc import channel

THREADS = 8


def test_threads_that_come_first_together_share_a_channel(monkeypatch: pytest.MonkeyPatch):
    made: list[str] = []
    first = threading.Event()

    def connect(target: str, **more: object):
        made.append(target)
        first.wait(0.2)  # time for a second one, if there were nothing to stop it
        return sync_channel(target)

    sync_channel = channel.sync_channel
    monkeypatch.setattr(channel, "sync_channel", connect)
    stubs = _wire_sync.Stubs(None, "", proxy=False)
    start = threading.Barrier(THREADS)

    def use(number: int) -> object:
        start.wait()
        return stubs.of("127.0.0.1:1")

    with ThreadPoolExecutor(THREADS) as threads:
        found = set(threads.map(use, range(THREADS)))
    assert (len(found), made) == (1, ["127.0.0.1:1"])
    stubs.close()


async def test_a_closed_client_makes_no_channel():
    blocking, asynchronous = _wire_sync.Stubs(None, "", proxy=False), _wire_aio.Stubs(None, "", proxy=False)
    blocking.close()
    await asynchronous.close()
    for stubs in (blocking, asynchronous):
        with pytest.raises(Cancelled, match="the client was closed"):
            stubs.of("127.0.0.1:1")


@pytest.mark.parametrize(("target", "proxy"), [("127.0.0.1:1", False), ("router.example:1", True)])
def test_of_several_routers_only_those_elsewhere_are_behind_a_proxy(
    monkeypatch: pytest.MonkeyPatch, target: str, proxy: bool
):
    seen: list[object] = []
    monkeypatch.setattr(channel, "sync_channel", lambda target, **more: seen.append(more["proxy"]))
    _wire_sync.Stubs(None, "", proxy=True).connect(target)
    assert seen == [proxy]
