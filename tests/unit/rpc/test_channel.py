"""Channel options that Baton relies on, and errors for listeners that cannot start."""

import re
import socket

import pytest

from baton.errors import ConfigError
from baton.rpc import channel


def test_keepalive_notices_a_frozen_peer_and_a_server_bears_the_pings_of_our_clients():
    link = channel.Link(receive_bytes=1, keepalive_s=1.5, ping_timeout_s=0.5)
    told = {"keepalive_time_ms": 1500, "http2.ping_timeout_ms": 500, "max_receive_message_length": 1}
    for options in (channel.channel_options(link), channel.server_options(link)):
        assert {name: dict(options)[f"grpc.{name}"] for name in told} == told
    least = dict(channel.server_options(channel.PUBLIC))["grpc.http2.min_ping_interval_without_data_ms"]
    assert least <= dict(channel.channel_options(channel.PUBLIC))["grpc.keepalive_time_ms"]


@pytest.mark.parametrize(
    ("bound", "called"),
    [
        ("0.0.0.0:5", "127.0.0.1:5"),
        ("[::]:5", "[::1]:5"),
        (":::5", "[::1]:5"),
        ("10.0.0.1:5", "10.0.0.1:5"),
        ("localhost:5", "localhost:5"),
    ],
)
def test_a_listener_on_all_addresses_is_called_by_the_loopback(bound, called):
    assert channel.from_here(bound) == called


async def test_a_port_in_use_is_an_error_that_names_it():
    first = channel.aio_server()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        others, ours = f"127.0.0.1:{taken.getsockname()[1]}", channel.bind(first, "127.0.0.1:0")
        assert re.fullmatch(r"127\.0\.0\.1:[1-9]\d*", ours), "the bound address"
        for address in (others, ours):
            with pytest.raises(ConfigError, match=rf"{address}.*in use"):
                channel.bind(channel.aio_server(), address)
    await first.stop(None)


NO_ADDRESSES = ("", "localhost", ":50051", "127.0.0.1:http", "127.0.0.1:", "127.0.0.1:99999")
ELSEWHERE = ("192.0.2.1:0", r"192\.0\.2\.1:0.*[Cc]annot assign")


@pytest.mark.parametrize(("address", "says"), [*((wrong, "host:port") for wrong in NO_ADDRESSES), ELSEWHERE])
async def test_an_address_must_be_host_and_port_of_this_machine(address: str, says: str):
    with pytest.raises(ConfigError, match=says):
        channel.bind(channel.aio_server(), address)
