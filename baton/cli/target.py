"""The cluster that a command is for: its routers, and the certificates and tokens for them."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import grpc

from baton.client import AsyncClient, Client
from baton.client._retry import targets_of
from baton.client.types import ClusterStatus
from baton.cluster.state_dir import ClusterState, StateFolder, running_clusters
from baton.config import ClusterConfig, load_config
from baton.errors import ConfigError, NoWorker
from baton.rpc.channel import PLAINTEXT, Wire, from_here
from baton.rpc.status import from_rpc_error
from baton.rpc.v1.admin_pb2_grpc import AdminStub
from router.auth.tokens import read_tokens

TOKEN_VARIABLE = "BATON_TOKEN"  # not an option, because all users of a machine see command lines
SYSTEM = Path("system")
TIMEOUT_S = 10.0
Reply = TypeVar("Reply")


def find_cluster(name: str | None, *, starting: bool = False) -> ClusterState:
    """Return the running cluster called `name`, or the only one. Raises NoWorker with the running clusters' names."""
    running = running_clusters()
    chosen = [state for state in running if name in {None, state.name}]
    if len(chosen) == 1:
        if not (chosen[0].ready or starting):
            lost = chosen[0].lost and StateFolder(chosen[0].name).config.exists()  # it is written after the download
            reason = "has no readable state file; `baton down` stops it" if lost else "is still starting"
            raise NoWorker(f"cluster {chosen[0].name!r} {reason}")
        return chosen[0]
    if not running:
        running_clusters(strict=True)
        raise NoWorker(
            "no cluster is running here; start one with: baton serve MODEL --detach, or baton up -c FILE --detach"
        )
    names = ", ".join(state.name for state in running)
    problem = f"no cluster named {name!r} is running" if name else "several clusters are running"
    raise NoWorker(f"{problem}; set --name to one of: {names}")


def check_secrets(config: ClusterConfig) -> None:
    """Check the files of tokens and of the receipt key before a router reads them. Raises ConfigError."""
    if config.security.tokens is not None:
        read_tokens(config.security.tokens)
    if config.security.receipt_key is not None:
        from baton.receipts.keys import ReceiptKey

        ReceiptKey.read(config.security.receipt_key)


@dataclass(frozen=True, slots=True)
class Credentials:
    """The certificates and the token for a cluster. The defaults are no encryption and no token."""

    wire: Wire = PLAINTEXT
    token: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, config: ClusterConfig) -> Credentials:
        return cls(Wire.of(config.security.tls), os.environ.get(TOKEN_VARIABLE) or None)

    @classmethod
    def find(cls, cluster: ClusterState | None, tls: Path | None) -> Credentials:
        """Return those by `tls` (a folder of `baton certs`, or a CA file), or else of `cluster`. Raises ConfigError."""
        file = StateFolder(cluster.name).config if cluster else None
        if tls is None and file is not None and file.exists():
            return cls.of(load_config(file))
        return cls(Wire.of_path(tls) if tls else PLAINTEXT, os.environ.get(TOKEN_VARIABLE) or None)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


@dataclass(frozen=True, slots=True)
class Admins:
    """The admin addresses of a cluster's routers. An address is empty while its router starts."""

    addresses: Sequence[str]
    credentials: Credentials = Credentials()

    @classmethod
    def find(cls, name: str | None, target: str | None, tls: Path | None) -> Admins:
        """Return `target` (admin addresses with commas), or the routers of the running cluster `name`. Raises NoWorker,
        ConfigError.
        """
        running = None if target else find_cluster(name)
        addresses = [running.admin, *running.admins[1:]] if running is not None else targets_of(str(target))
        return cls([from_here(address) for address in addresses], Credentials.find(running, tls))

    @property
    def started(self) -> list[str]:
        if not any(self.addresses):
            raise NoWorker("the cluster is still starting")
        return [address for address in self.addresses if address]

    def call(self, address: str, method: Callable[..., Reply], timeout_s: float = TIMEOUT_S) -> Reply:
        """Return `method(stub, timeout=..., metadata=...)` for the router at `address`. Raises BatonError."""
        with self.credentials.wire.sync(address) as channel:
            try:
                return method(AdminStub(channel), timeout=timeout_s, metadata=self.credentials.metadata)
            except grpc.RpcError as error:
                raise from_rpc_error(error, address) from None

    def status(self, address: str, timeout_s: float = TIMEOUT_S) -> ClusterStatus:
        if not address:
            raise NoWorker("the router is still starting")
        token, tls = self.credentials.token, self.credentials.wire
        with Client(address, admin=address, timeout=timeout_s, token=token, tls=tls) as client:
            return client.cluster()


@dataclass(frozen=True, slots=True)
class Router:
    """A router for requests, at `target` or of the running cluster `name`."""

    name: str | None
    target: str | None
    timeout: float  # seconds for each call
    token: str | None = field(default=None, repr=False)
    tls: Path | None = None  # a CA file, a folder of `baton certs`, SYSTEM, or None for the running cluster's settings

    def client(self) -> Client:
        """Return a client. Raises NoWorker if no cluster runs, ConfigError for an unusable token or CA file."""
        address, tls = self._reach()
        return Client(address, token=self.token, tls=tls, timeout=self.timeout)

    def async_client(self, max_retries: int) -> AsyncClient:
        address, tls = self._reach()
        return AsyncClient(address, token=self.token, tls=tls, timeout=self.timeout, max_retries=max_retries)

    def authorities(self) -> ssl.SSLContext | None:
        """Return the trusted HTTPS authorities, or None for this machine's. Raises ConfigError for a bad CA file."""
        if self.tls is None or self.tls == SYSTEM:
            return None
        try:
            return ssl.create_default_context(cadata=Wire.of_path(self.tls).ca.decode())
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"tls: {self.tls} has no certificate of an authority: {error}") from error

    def _reach(self) -> tuple[str, Wire | bool]:
        running = None if self.target else find_cluster(self.name)
        address = from_here(running.grpc) if running is not None else str(self.target)
        return address, self.tls == SYSTEM or Credentials.find(running, self.tls).wire
