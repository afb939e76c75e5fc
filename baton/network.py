"""What a host calls itself: the addresses of its network interfaces, and by which of them others reach a listener.

Asked on the host that listens, never where its cluster file was read by somebody else.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from urllib.parse import urlsplit

import psutil

from baton.config.values import split_address
from baton.errors import ConfigError

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_REDIS_PORT = 6379
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def interface_address(name: str, key: str, *, v6: bool = True) -> str:
    """The first IPv4 address of a network interface of this host, else, if `v6`, one of IPv6 that needs no zone.

    Raises ConfigError naming the key of the cluster file, and which interfaces there are.
    """
    known = psutil.net_if_addrs()
    if name not in known:
        raise ConfigError(f"{key}: this host has no network interface {name!r}, it has {', '.join(sorted(known))}")
    found = {family: [one.address for one in known[name] if one.family == family] for family in _FAMILIES}
    plain = [*found[socket.AF_INET], *(one for one in found[socket.AF_INET6] if v6 and "%" not in one)]
    if not plain:
        raise ConfigError(f"{key}: the network interface {name!r} has no {'IP' if v6 else 'IPv4'} address on this host")
    return plain[0]


def told_host(listen: str, advertise: str | None, interface: str | None, redis_url: str, key: str) -> str:
    """The host by which others call a listener at `listen`; an address of IPv6 in brackets.

    At one address: that. At all: `advertise`, else what `interface` has, else whence this host calls Redis, for there
    the others are told; the loopback if Redis is there. Raises ConfigError about `key`, which names the interface.
    """
    host = split_address(listen)[0]
    if advertise:
        return advertise
    if host in EVERYWHERE:
        v6 = host == "::"
        host = interface_address(interface, key, v6=v6) if interface else _towards(redis_url, v6=v6) or EVERYWHERE[host]
    return f"[{host}]" if ":" in host else host


def kv_host(listen: str, told: str, interface: str | None, key: str) -> str:
    """The one address at which KV is taken and sent: of `interface`, else of the listener, else what others are told.

    Raises ConfigError, as `told_host`.
    """
    host = split_address(listen)[0]
    if interface:
        return interface_address(interface, key)
    return told.strip("[]") if host in EVERYWHERE else host


def called(address: str, advertise: str | None, interface: str | None, redis_url: str, key: str) -> str:
    """`address`, where a router listens, as others call it: changed if it is at all addresses. Raises ConfigError."""
    host, port = split_address(address)
    return f"{told_host(address, advertise, interface, redis_url, key)}:{port}" if host in EVERYWHERE else address


def _towards(redis_url: str, *, v6: bool) -> str | None:
    """From which address of this host a connection to Redis leaves. Nothing is sent: that is how UDP connects."""
    url = urlsplit(redis_url)
    if not url.hostname:  # a Unix socket
        return None
    try:
        kind = socket.AF_UNSPEC if v6 else socket.AF_INET
        family, _, _, _, there = socket.getaddrinfo(url.hostname, url.port or _REDIS_PORT, kind, socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)
            here = str(probe.getsockname()[0])
    except OSError:  # who connects to Redis says it better
        return None
    return None if ipaddress.ip_address(here.partition("%")[0]).is_loopback else here


def redacted(url: str) -> str:
    """The URL with its password, and everything in its query, replaced by `***`: fit for a log.

    `redis://user:secret@host/0?password=secret` becomes `redis://user:***@host/0?***`.
    """
    head, mark, query = url.partition("?")
    if "@" in query:  # the password contains one of the two marks, so its end is unknown
        return re.sub("://.*", "://***", url)
    return re.sub(r"(://[^:@/]*:).*@", r"\1***@", head) + mark + "***" * bool(query)
