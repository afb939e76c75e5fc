"""The router that request commands call, with token and certificates."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from baton.cli.credentials import find_reach
from baton.cli.up import find_cluster
from baton.client import AsyncClient, Client
from baton.errors import ConfigError
from baton.rpc.channel import Wire, from_here

SYSTEM = Path("system")


@dataclass(frozen=True, slots=True)
class Router:
    """A router at `target`, or of the running cluster `name`. `tls` is a CA file, a folder of `baton certs`, `system`
    for this machine's authorities, or None for the running cluster's settings.
    """

    name: str | None
    target: str | None
    timeout: float  # seconds for each call
    token: str | None = field(default=None, repr=False)
    tls: Path | None = None

    def client(self) -> Client:
        """Return a client. Raises NoWorker if no cluster runs, ConfigError for an unusable token or CA file."""
        address, tls = self._reach()
        return Client(address, token=self.token, tls=tls, timeout=self.timeout)

    def async_client(self, max_retries: int) -> AsyncClient:
        """Return an asynchronous client with `max_retries` retries per failed call. Raises the errors of `client`."""
        address, tls = self._reach()
        return AsyncClient(address, token=self.token, tls=tls, timeout=self.timeout, max_retries=max_retries)

    def authorities(self) -> ssl.SSLContext | None:
        """Return the trusted HTTPS authorities, or None for this machine's. Raises ConfigError for a bad CA file."""
        if self.tls is None or self.tls == SYSTEM:
            return None
        try:
            return ssl.create_default_context(cadata=find_reach(None, self.tls).wire.ca.decode())
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"tls: {self.tls} has no certificate of an authority: {error}") from error

    def _reach(self) -> tuple[str, Wire | bool]:
        running = None if self.target else find_cluster(self.name)
        address = from_here(running.grpc) if running is not None else str(self.target)
        return address, self.tls == SYSTEM or find_reach(running, self.tls).wire
