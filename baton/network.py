"""Addresses of this host: those of its network interfaces, and the one under which other hosts reach a listener. Call
it on the listening host, not where its cluster file was loaded. Also the limit of open files, because each connection
needs one.
"""

from __future__ import annotations

import ipaddress
import re
import resource
import socket
from contextlib import suppress
from urllib.parse import urlsplit

import psutil

from baton.config.values import split_address
from baton.errors import ConfigError

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
OPEN_FILES = 1 << 16  # wanted; more makes programs slow that close all possible descriptors
_REDIS_PORT = 6379
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def interface_address(name: str, key: str, *, v6: bool = True) -> str:
    """Return an interface's first IPv4 address, or else, if `v6`, an IPv6 one without a zone. Raises ConfigError."""
    known = psutil.net_if_addrs()
    if name not in known:
        raise ConfigError(f"{key}: this host has no network interface {name!r}; it has {', '.join(sorted(known))}")
    found = {family: [one.address for one in known[name] if one.family == family] for family in _FAMILIES}
    plain = [*found[socket.AF_INET], *(one for one in found[socket.AF_INET6] if v6 and "%" not in one)]
    if not plain:
        raise ConfigError(f"{key}: the network interface {name!r} has no {'IP' if v6 else 'IPv4'} address on this host")
    return plain[0]


def reachable_host(listen: str, advertise: str | None, interface: str | None, redis_url: str, key: str) -> str:
    """Return the host under which others reach a listener at `listen`; IPv6 in brackets.

    It is `advertise` if set, else the listen address. A wildcard address becomes that of `interface`, else the local
    address of a connection to Redis, where the others read it; loopback if Redis is local. Raises ConfigError about
    `key`, the config key of the interface.
    """
    host = split_address(listen)[0]
    if advertise:
        return advertise
    if host in EVERYWHERE:
        v6 = host == "::"
        host = interface_address(interface, key, v6=v6) if interface else _towards(redis_url, v6=v6) or EVERYWHERE[host]
    return f"[{host}]" if ":" in host else host


def kv_host(listen: str, advertised: str, interface: str | None, key: str) -> str:
    """Return the address for KV: of `interface`, else the listener, else the advertised one. Raises ConfigError."""
    host = split_address(listen)[0]
    if interface:
        return interface_address(interface, key)
    return advertised.strip("[]") if host in EVERYWHERE else host


def reachable_address(address: str, advertise: str | None, interface: str | None, redis_url: str, key: str) -> str:
    """Return the address under which others reach a listener; only wildcard addresses change. Raises ConfigError."""
    host, port = split_address(address)
    return f"{reachable_host(address, advertise, interface, redis_url, key)}:{port}" if host in EVERYWHERE else address


def _towards(redis_url: str, *, v6: bool) -> str | None:
    """Return the local address of a connection to Redis. Connecting a UDP socket sends nothing."""
    url = urlsplit(redis_url)
    if not url.hostname:  # a Unix socket
        return None
    try:
        kind = socket.AF_UNSPEC if v6 else socket.AF_INET
        family, _, _, _, there = socket.getaddrinfo(url.hostname, url.port or _REDIS_PORT, kind, socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)
            here = str(probe.getsockname()[0])
    except OSError:  # the Redis client reports it better
        return None
    return None if ipaddress.ip_address(here.partition("%")[0]).is_loopback else here


def redacted(url: str) -> str:
    """Return the URL for logs: its password and its whole query are replaced by `***`.
    `redis://user:secret@host/0?password=secret` becomes `redis://user:***@host/0?***`.
    """
    head, mark, query = url.partition("?")
    if "@" in query:  # the password contains one of the two marks, so its end is unknown
        return re.sub("://.*", "://***", url)
    return re.sub(r"(://[^:@/]*:).*@", r"\1***@", head) + mark + "***" * bool(query)


def open_files() -> int:
    """Return the soft limit, which counts."""
    return _finite(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def most_open_files() -> int:
    """Return the hard limit, up to which a process may raise the soft one."""
    return _finite(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def raise_open_files() -> int:
    """Raise the soft limit to `OPEN_FILES` or the hard limit, and return it. Processes started later inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(OPEN_FILES, _finite(hard))
    if _finite(soft) < wanted:
        with suppress(OSError, ValueError):  # the system may forbid it; the process then runs with fewer
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return open_files()


def _finite(limit: int) -> int:
    return OPEN_FILES if limit == resource.RLIM_INFINITY else limit
