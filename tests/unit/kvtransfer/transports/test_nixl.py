"""The NIXL transport: what it needs, its staging, and the process that serves it."""

import os
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from baton.errors import ChannelBroken, ConfigError
from kvtransfer.transports.base import Side
from kvtransfer.transports.nixl import KEY, NixlTransport, Staging
from tests.support.nixl import Agents, Library
from tests.unit.kvtransfer.support import SETTINGS
from tests.unit.kvtransfer.transports.pairs import NAME, RING, mute, relayed


def made(agents: Agents, **change: Any) -> NixlTransport:
    return NixlTransport(replace(SETTINGS, **change), Library(agents), agents.serve)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"interface": "none"}, "NIXL: NIXL_ERR_BACKEND"),
        ({"bind_host": "192.0.2.1"}, r"no network interface here has the address 192\.0\.2\.1"),
        ({"encrypted": True}, "does not encrypt"),
    ],
)
def test_a_missing_part_is_an_error_with_the_reason(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        made(Agents(), **change)


@pytest.mark.parametrize(("change", "device"), [({}, "lo"), ({"interface": "ib0"}, "ib0")])
def test_it_uses_only_tcp_on_the_interface_for_kv(change: dict[str, str], device: str) -> None:
    agents = Agents()
    made(agents, **change)
    assert {config.partition(",TCP")[0] for config in agents.configs} == {f"NET_DEVICES={device},TLS=tcp"}


def test_staging_is_served_once_and_again_after_its_process_has_ended_or_no_room_is_left(monkeypatch) -> None:
    agents = Agents()
    serve = Mock(side_effect=agents.serve)
    transport = NixlTransport(SETTINGS, Library(agents), serve)
    ends = [transport.open(NAME, Side.SENDER, mute(), RING, 1.0) for _ in range(2)]
    assert serve.call_count == 1
    ends[0].start(0, 8)
    vars(transport._served[1])["ended"] = True
    for end in ends:
        with pytest.raises(ChannelBroken, match="the process that serves the staging has ended"):
            end.start(1, 8)
    transport.open(NAME, Side.SENDER, mute(), RING, 1.0).start(0, 8)
    assert serve.call_count == 2
    monkeypatch.setattr("kvtransfer.transports.nixl.STAGING_BYTES", RING.nbytes)
    for calls in (3, 4):
        transport.open(NAME, Side.SENDER, mute(), RING, 1.0).start(0, 8)
        assert serve.call_count == calls


def test_a_part_of_staging_is_never_used_again_and_is_empty_after_it_was_freed() -> None:
    staging = Staging()
    with staging.readable() as file, pytest.raises(OSError, match="Bad file descriptor"):
        os.write(file, b"x")
    at, memory = staging.take(5000)
    memory.fill_(7)
    staging.free(at, len(memory))
    assert not memory.any()
    assert staging.take(5000)[0] >= at + len(memory)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("other", b"", "the peer sent 'other' instead of 'nixl'"),
        (KEY, bytes(8), "the peer sent no agent"),
        (KEY, bytes(8) + b"agent", "NIXL: NIXL_ERR_MISMATCH"),
    ],
)
def test_a_peer_that_sends_nonsense_opens_no_channel(key: str, value: bytes, why: str) -> None:
    sender, receiver = relayed()
    sender.send(key, value)
    with pytest.raises(ChannelBroken, match=f"not built: {why}"):
        made(Agents()).open(NAME, Side.RECEIVER, receiver, RING, 1.0)
