"""The NIXL transport: what it needs, its staging, and the process that serves it."""

import gc
import mmap
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from baton.errors import ChannelBroken, ConfigError
from kvtransfer.transports.base import KeyRelay, Ring, Side
from kvtransfer.transports.nixl import KEY, NixlTransport, ServingProcess, Staging
from tests.support.nixl import Agents, Library, held_by
from tests.support.time_factor import scaled
from tests.unit.kvtransfer.support import SETTINGS
from tests.unit.kvtransfer.transports.pairs import NAME, PATIENT_S, RING, descriptors, mute, relayed


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


def test_staging_is_served_once_and_again_after_its_process_has_ended_or_no_part_is_left() -> None:
    agents = Agents()
    serve = Mock(side_effect=agents.serve)
    transport = NixlTransport(replace(SETTINGS, staging_memory=RING.nbytes), Library(agents), serve)
    ends = [transport.open(NAME, Side.SENDER, mute(), RING, 1.0) for _ in range(2)]
    assert serve.call_count == 1
    ends[0].start(0, 8)
    vars(transport._served[1])["ended"] = True
    for end in ends:
        with pytest.raises(ChannelBroken, match="the process that serves the staging has ended"):
            end.start(1, 8)
    for calls in (2, 2, 2, 2, 3):  # four rings fit
        transport.open(NAME, Side.SENDER, mute(), RING, 1.0).start(0, 8)
        assert serve.call_count == calls


def test_of_two_channels_that_open_at_once_each_gets_a_part(monkeypatch) -> None:
    """The second one opens while the first one asks for its address, and nothing is left behind the first one."""
    transport, ring = made(Agents(), staging_memory=RING.nbytes), Ring(3, RING.nbytes)
    served, (asked, go) = transport._served[1], (threading.Event(), threading.Event())
    where = served.where

    def slow(deadline_s: float) -> tuple[int, bytes]:
        asked.set()
        assert go.wait(scaled(10))
        return where(deadline_s)

    monkeypatch.setattr(served, "where", slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(transport.open, NAME, Side.SENDER, mute(), ring, 1.0)
        assert asked.wait(scaled(10))
        monkeypatch.setattr(served, "where", where)
        transport.open(NAME, Side.SENDER, mute(), ring, 1.0).start(0, 8)
        go.set()
        first.result(scaled(10)).start(0, 8)


def test_a_ring_that_never_fits_is_refused_before_anything_is_taken() -> None:
    transport = made(Agents(), staging_memory=RING.nbytes)
    served = transport._served
    with pytest.raises(ChannelBroken, match="asks for staging of 2361183241434822606848 bytes, 1048576 are here"):
        transport.open(NAME, Side.SENDER, mute(), Ring(1 << 31, 1 << 40), 1.0)
    assert transport._served is served


def test_a_part_of_staging_is_never_used_again_and_is_empty_after_it_was_freed() -> None:
    staging = Staging(1 << 20)
    with staging.readable() as file:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(file, b"x")
        late = mmap.mmap(file, 0, prot=mmap.PROT_READ)
    at, part = staging.take(5000)
    part.fill_(7)
    (other, _), (last, _) = staging.take(1), staging.take(1)
    staging.free(at)
    staging.free(last)
    assert late[at : at + 5000] == late[1 << 19 : (1 << 19) + 5000] == bytes(5000)
    assert held_by(staging) == 4096 + 2 * 8192, "reads occupy pages outside of parts"
    staging.free(other)
    assert held_by(staging) == 0
    assert staging.take(5000)[0] >= at + len(part)
    assert held_by(staging) == 8192
    with pytest.raises(OSError, match="no free part"):
        staging.take(1 << 20)


@pytest.mark.parametrize("fault", ["where", "keys", "memory", "none"])
def test_a_sender_that_is_not_built_or_is_closed_keeps_no_staging(monkeypatch, fault: str) -> None:
    transport = made(Agents())
    staging, served = transport._served
    broken = Mock(side_effect=OSError("as planned"))
    relay = KeyRelay(broken) if fault == "keys" else mute()
    if fault == "where":
        monkeypatch.setattr(served, "where", broken)
    if fault == "memory":
        monkeypatch.setattr(os, "posix_fallocate", lambda file, at, nbytes: os.pwrite(file, b"x", at) and broken())
    if fault == "none":
        end = transport.open(NAME, Side.SENDER, relay, RING, 1.0)
        assert held_by(staging) == RING.nbytes
        end.close()
    else:
        with pytest.raises(ChannelBroken, match="not built: as planned"):
            transport.open(NAME, Side.SENDER, relay, RING, 1.0)
    assert held_by(staging) == 0


def test_a_process_that_freezes_is_ended_and_none_outlives_its_owner(monkeypatch, tmp_path: Path) -> None:
    """The interpreter of the process is a script that answers as `nixl_agent` does."""
    program, seen = tmp_path / "python", tmp_path / "environ"
    program.write_text(
        f"#!/bin/sh\nenv > {seen}\nls /proc/self/fd > {seen}.fds\nwhile read line; do echo 4096 6162; done\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setenv("BATON_TOKEN", "a secret")
    before = descriptors()
    served = ServingProcess(Mock(__name__="bindings"), Staging(1 << 20), "")
    process = served._process
    assert served.where(PATIENT_S) == (4096, b"ab")
    assert "secret" not in seen.read_text()
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    with pytest.raises(TimeoutError, match=r"did not answer within 0\.1 s"):
        served.where(0.1)
    process.wait()
    assert served.ended
    with pytest.raises(OSError):
        served.where(PATIENT_S)
    other = ServingProcess(Mock(__name__="bindings"), Staging(1 << 20), "")
    process = other._process
    del served, other
    gc.collect()
    assert process.returncode == -signal.SIGKILL
    assert descriptors() <= before


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
