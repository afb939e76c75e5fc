"""The limit of open files: a process raises its soft limit, and listeners accept a share of it as connections."""

import resource
from typing import Any
from unittest.mock import Mock

import pytest

from baton import network
from baton.limits import MAX_CALLS_PER_CONNECTION, MAX_GRPC_CONNECTIONS, MAX_HTTP_CONNECTIONS
from baton.rpc.channel import INTERNAL, server_options
from router.openai.connections import BoundedProtocol

PLENTY, WITHOUT = network.OPEN_FILES, resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The soft and hard limits of this process, the last one set being in force."""
    found = [(80, 1000)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: found[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: found.append(limit))
    return found


def accepted() -> tuple[int, int]:
    """Return how many connections an HTTP listener and a gRPC listener accept."""
    http = BoundedProtocol.__new__(BoundedProtocol)
    return http.limit, dict(server_options(INTERNAL))["grpc.max_allowed_incoming_connections"]


@pytest.mark.parametrize(
    ("soft", "http", "grpc"),
    [(80, 40, 10), (4, 2, 1), (2**20, MAX_HTTP_CONNECTIONS, MAX_GRPC_CONNECTIONS)],
)
def test_listeners_accept_a_share_of_the_open_files_as_connections(limits, soft: int, http: int, grpc: int) -> None:
    limits.append((soft, 2**20))
    assert accepted() == (http, grpc)


def test_a_connection_carries_a_limited_number_of_calls() -> None:
    assert dict(server_options(INTERNAL))["grpc.max_concurrent_streams"] == MAX_CALLS_PER_CONNECTION


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((80, 1000), (1000, 1000), id="to the hard limit"),
        pytest.param((80, 2 * PLENTY), (PLENTY, 2 * PLENTY), id="to what is enough"),
        pytest.param((80, WITHOUT), (PLENTY, WITHOUT), id="without a hard limit"),
        pytest.param((2 * PLENTY, WITHOUT), (2 * PLENTY, WITHOUT), id="it is never lowered"),
        pytest.param((WITHOUT, WITHOUT), (WITHOUT, WITHOUT), id="no limit"),
    ],
)
def test_a_process_raises_its_soft_limit(limits, before: tuple[int, int], after: tuple[int, int]) -> None:
    limits.append(before)
    assert network.raise_open_files() == (PLENTY if after[0] == WITHOUT else after[0])
    assert limits[-1] == after


@pytest.mark.parametrize("error", [ValueError("not allowed"), OSError("EPERM")])
def test_a_system_that_forbids_it_changes_nothing(limits, monkeypatch: Any, error: Exception) -> None:
    monkeypatch.setattr(resource, "setrlimit", Mock(side_effect=error))
    assert network.raise_open_files() == 80
