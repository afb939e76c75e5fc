"""The address at which others reach a listener of this host."""

import socket
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from baton.errors import ConfigError
from baton.network import interface_address, kv_host, reachable_address, reachable_host

V4, V6 = socket.AF_INET, socket.AF_INET6
INTERFACES = {
    "lo": [(V4, "127.0.0.1"), (V6, "::1")],
    "eth0": [(socket.AF_PACKET, "02:00:00:00:00:01"), (V6, "fe80::1%eth0"), (V6, "fd00::5"), (V4, "10.0.0.5")],
    "ib0": [(V6, "fe80::2%ib0"), (V6, "fd00::7")],
    "down0": [(socket.AF_PACKET, "02:00:00:00:00:02"), (V6, "fe80::3%down0")],
}
HERE, KEY = "redis://127.0.0.1:6379/0", "decode.interface"
FAR, FAR_V6, SOCKET = "redis://:password@192.0.2.9:6380/0", "rediss://[2001:db8::9]/0", "unix:///run/redis.sock?db=0"
ROUTES = {"127.0.0.1": "127.0.0.1", "192.0.2.9": "10.0.0.5", "2001:db8::9": "fd00::5"}


@pytest.fixture(autouse=True)
def network(monkeypatch):
    """A host with these interfaces, and a route to the tests' Redis."""
    known = {
        name: [SimpleNamespace(family=family, address=address) for family, address in found]
        for name, found in INTERFACES.items()
    }
    monkeypatch.setattr("psutil.net_if_addrs", lambda: known)

    @contextmanager
    def probe(family, kind):
        assert kind == socket.SOCK_DGRAM, "nothing may be sent"
        peers: list[str] = []

        def local_address():
            if peers[0] not in ROUTES:
                raise OSError("unreachable")
            return ROUTES[peers[0]], 40000

        yield SimpleNamespace(connect=lambda there: peers.append(there[0]), getsockname=local_address)

    monkeypatch.setattr("socket.socket", probe)


@pytest.mark.parametrize(
    ("listen", "advertise", "interface", "redis", "told"),
    [
        ("127.0.0.1:0", None, None, FAR, "127.0.0.1"),
        ("10.0.0.5:7000", None, "ib0", FAR, "10.0.0.5"),  # it does not listen on the other one
        ("10.0.0.5:7000", "worker.example", None, FAR, "worker.example"),
        ("0.0.0.0:0", "worker.example", "eth0", FAR, "worker.example"),
        ("0.0.0.0:0", None, "eth0", HERE, "10.0.0.5"),
        ("[::]:0", None, "ib0", HERE, "[fd00::7]"),
        ("[::]:0", None, "eth0", HERE, "10.0.0.5"),
        ("0.0.0.0:0", None, None, FAR, "10.0.0.5"),
        ("[::]:0", None, None, FAR_V6, "[fd00::5]"),
        ("0.0.0.0:0", None, None, HERE, "127.0.0.1"),
        ("[::]:0", None, None, SOCKET, "[::1]"),
        ("0.0.0.0:0", None, None, SOCKET, "127.0.0.1"),
        ("0.0.0.0:0", None, None, "redis://198.51.100.1/0", "127.0.0.1"),  # no route; the missing Redis is found soon
        ("0.0.0.0:0", None, None, FAR_V6, "127.0.0.1"),  # no one could connect to that by IPv6
    ],
)
def test_what_others_are_told(listen, advertise, interface, redis, told):
    assert reachable_host(listen, advertise, interface, redis, KEY) == told


@pytest.mark.parametrize(
    ("listen", "told", "interface", "host"),
    [
        ("0.0.0.0:0", "10.0.0.5", "ib0", "fd00::7"),
        ("127.0.0.1:0", "127.0.0.1", "eth0", "10.0.0.5"),
        ("127.0.0.1:0", "worker.example", None, "127.0.0.1"),
        ("0.0.0.0:0", "worker.example", None, "worker.example"),
        ("[::]:0", "[fd00::5]", None, "fd00::5"),
    ],
)
def test_where_kv_goes(listen, told, interface, host):
    assert kv_host(listen, told, interface, KEY) == host


@pytest.mark.parametrize(
    ("name", "v6", "says"),
    [
        ("eth9", True, r".*'eth9'; it has down0, eth0, ib0, lo$"),
        ("down0", True, "the network interface 'down0' has no IP address"),
        ("ib0", False, "the network interface 'ib0' has no IPv4 address"),
    ],
)
def test_an_interface_without_an_address_to_call_is_named_with_its_key(name, v6, says):
    with pytest.raises(ConfigError, match=rf"^decode\.interface: {says}"):
        interface_address(name, KEY, v6=v6)


@pytest.mark.parametrize(
    ("address", "there"),
    [("0.0.0.0:80", "10.0.0.5:80"), ("127.0.0.1:80", "127.0.0.1:80"), ("[::]:80", "10.0.0.5:80")],
)
def test_a_router_is_told_by_the_host_only_where_it_listens_everywhere(address, there):
    assert reachable_address(address, None, "eth0", HERE, "router.interface") == there
