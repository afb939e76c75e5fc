"""The channels of both clients: created once, on first use, and never after closing."""

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

import baton
import baton.client
from baton.client import _transport_aio, _transport_sync
from baton.errors import Cancelled
from baton.rpc import channel

THREADS = 8


def test_threads_that_come_first_together_share_a_channel(monkeypatch: pytest.MonkeyPatch):
    real, start = channel.sync_channel, threading.Barrier(THREADS)

    def slowly(target: str, **more: object):
        threading.Event().wait(0.2)  # time for a second channel, if there were no lock
        return real(target)

    connect = Mock(side_effect=slowly)
    monkeypatch.setattr(channel, "sync_channel", connect)
    stubs = _transport_sync.Stubs(None, "", proxy=False)

    def use(number: int) -> object:
        start.wait()
        return stubs.of("127.0.0.1:1")

    with ThreadPoolExecutor(THREADS) as threads:
        found = set(threads.map(use, range(THREADS)))
    assert (len(found), connect.call_count) == (1, 1)
    stubs.close()


async def test_a_closed_client_makes_no_channel():
    blocking, asynchronous = _transport_sync.Stubs(None, "", proxy=False), _transport_aio.Stubs(None, "", proxy=False)
    blocking.close()
    await asynchronous.close()
    for stubs in (blocking, asynchronous):
        with pytest.raises(Cancelled, match="the client was closed"):
            stubs.of("127.0.0.1:1")


def test_the_package_exports_the_clients():
    assert (baton.Client, baton.AsyncClient) == (baton.client.Client, baton.client.AsyncClient)
    with pytest.raises(AttributeError, match="Clinet"):
        _ = baton.Clinet  # type: ignore[attr-defined]


@pytest.mark.parametrize(("target", "proxy"), [("127.0.0.1:1", False), ("router.example:1", True)])
def test_of_several_routers_only_those_elsewhere_are_behind_a_proxy(
    monkeypatch: pytest.MonkeyPatch, target: str, proxy: bool
):
    monkeypatch.setattr(channel, "sync_channel", connect := Mock())
    _transport_sync.Stubs(None, "", proxy=True).connect(target)
    assert connect.call_args.kwargs["proxy"] is proxy
