"""Listeners of a cluster that cannot be opened, found before anything starts."""

from __future__ import annotations

import socket
from typing import Any

from baton.cluster.gpus import ON_THIS_HOST, most_workers
from baton.cluster.state_dir import running_clusters
from baton.config import ClusterConfig
from baton.config.values import split_address
from baton.errors import ConfigError


def check_ports(config: ClusterConfig) -> None:
    """Raise ConfigError with the key of each address that cannot be opened. A running cluster of this name is left to
    the lock of its state folder, which has a better message.
    """
    if any(state.name == config.name for state in running_clusters()):
        return
    given = listeners(config)
    found = {key: problem_of(config, given, key) for key in given}
    advice = "choose another port, or 0 for any free one"
    if problems := [f"{key}: {problem}; {advice}" for key, problem in found.items() if problem]:
        raise ConfigError("\n".join(problems))


def problem_of(config: ClusterConfig, given: dict[str, str], key: str) -> str:
    """Return why the address of `key` in `listeners` cannot be opened by each process that needs it, or ""."""
    address, workers = given[key], {"prefill": config.prefill, "decode": config.decode}.get(key.partition(".")[0])
    if workers and (most := most_workers(workers)) > 1 and split_address(address)[1]:
        return f"{address} is for one worker, but this host has up to {most}"
    return port_problem(address) or _used_twice(given, key)


def _used_twice(given: dict[str, str], key: str) -> str:
    others = (other for other in given if other < key and _meet(given[other], given[key]))
    return next((f"{given[key]} is also {other}" for other in others), "")


def _meet(one: str, other: str) -> bool:
    """Return whether both addresses have a port in common, which also all addresses of a host have."""
    (host, port), (other_host, other_port) = split_address(one), split_address(other)
    return port == other_port != 0 and (host == other_host or not {host, other_host}.isdisjoint(("0.0.0.0", "::")))


def listeners(config: ClusterConfig) -> dict[str, str]:
    """Return the addresses of this host's processes by key, as host:port. Port 0 means any free one. Addresses of
    workers are among them unless an existing Ray places the workers.
    """
    router = config.router
    given = {"grpc": router.grpc, "admin": router.admin, "http": router.http, "metrics": router.metrics}
    found = {f"router.{name}": address for name, address in given.items() if address}
    for name, pool in {"prefill": config.prefill, "decode": config.decode}.items():
        if config.ray.address in ON_THIS_HOST and most_workers(pool):
            found |= {f"{name}.listen": pool.listen} | ({f"{name}.metrics": pool.metrics} if pool.metrics else {})
    return found


def port_problem(address: str) -> str:
    """Return why `address` (host:port) cannot be opened now, or ""."""
    host, port = split_address(address)
    if port == 0:
        return ""
    problem = ""
    try:
        for family, kind, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            if not (problem := _unbound(family, kind, place)):
                break  # one address is enough for gRPC
    except OSError as error:  # the name has no address
        problem = error.strerror or str(error)
    return f"cannot listen on {address}: {problem}" if problem else ""


def _unbound(family: int, kind: int, place: Any) -> str:
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(place)
        except OSError as error:
            return error.strerror or str(error)
    return ""
