"""The NIXL transport: what it needs, the pieces of a frame, and the process that exposes a pool."""

import struct
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from baton.errors import ChannelBroken, ConfigError
from kvtransfer.frames import FrameSpec
from kvtransfer.transports.base import Side
from kvtransfer.transports.nixl import KEY, NixlPool, NixlTransport
from tests.support.nixl import Agents, Library
from tests.unit.kvtransfer.support import LAYOUT, SETTINGS, make_kv
from tests.unit.kvtransfer.transports.pairs import NAME, RING, mute, relayed


def made(agents: Agents, **change: Any) -> NixlTransport:
    return NixlTransport(make_kv(1, exposed=True), replace(SETTINGS, **change), Library(agents), agents.expose)


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


def test_a_pool_is_exposed_once_and_again_after_its_process_has_ended() -> None:
    agents = Agents()
    expose = Mock(side_effect=agents.expose)
    transport = NixlTransport(make_kv(1, exposed=True), SETTINGS, Library(agents), expose)
    ends = [transport.open(NAME, Side.SENDER, mute(), RING, 1.0) for _ in range(2)]
    assert expose.call_count == 1
    ends[0].start(0, 8)
    vars(transport._exposed)["ended"] = True
    for end in ends:
        with pytest.raises(ChannelBroken, match="the process that exposes the pool has ended"):
            end.start(1, 8)
    transport.open(NAME, Side.SENDER, mute(), RING, 1.0).start(0, 8)
    assert expose.call_count == 2


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("other", b"", "the peer sent 'other' instead of 'nixl'"),
        (KEY, bytes(32), "the peer sent no agent"),
        (KEY, struct.pack("<QQQQ", 0, 2, 1, 4) + b"agent", "1 bytes are not 2 blocks of 4 positions"),
        (KEY, struct.pack("<QQQQ", 0, 0, 0, 4) + b"agent", "NIXL: NIXL_ERR_MISMATCH"),
    ],
)
def test_a_peer_that_sends_nonsense_opens_no_channel(key: str, value: bytes, why: str) -> None:
    sender, receiver = relayed()
    sender.send(key, value)
    with pytest.raises(ChannelBroken, match=f"not built: {why}"):
        made(Agents()).open(NAME, Side.RECEIVER, receiver, RING, 1.0)


@pytest.mark.parametrize(("blocks", "pieces"), [([7, 8, 9], 1), ([7, 8, 3], 2), ([9, 8, 7], 3), ([5], 1)])
@pytest.mark.parametrize("tensors", [("k", "v"), ("latent",)])
def test_neighbouring_blocks_are_one_piece(blocks: list[int], pieces: int, tensors) -> None:
    """Pieces are in wire order, and have all bytes of the frame: here all but the first and last position."""
    layout = replace(LAYOUT, tensors=tensors)
    kv = make_kv(1, layout=layout, exposed=True)
    assert kv.exposed is not None
    start = kv.exposed.kv.data_ptr() - kv.exposed.shape.kv_at
    pool = NixlPool("pool", [Mock(), Mock()], start, kv.exposed.shape, layout, RING)
    begin, end = 1, len(blocks) * layout.block_size - 1
    spec = FrameSpec(1, 3, begin, end, 2 * (end - begin) * layout.layer_token_bytes)
    remote, nbytes = pool._rectangle(spec, np.array(blocks, dtype=np.uint64))
    assert len(remote) == len(nbytes) == 2 * len(tensors) * pieces
    first = kv.exposed.kv.data_ptr()
    found = [kv.exposed.kv[at - first :][:n] for at, n in zip(remote.tolist(), nbytes.tolist(), strict=True)]
    assert b"".join(bytes(part.numpy()) for part in found) == bytes(kv.copied(spec.layers, blocks, begin, end).numpy())
