"""Which router the commands ask that send requests, and how they say who they are."""

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
    """`target`, or the running cluster called `name`. `tls`: a CA file, a folder of `baton certs`, or `system` for the
    authorities known here; None: as the running cluster says.
    """

    name: str | None
    target: str | None
    timeout: float  # seconds for each call
    token: str | None = field(default=None, repr=False)
    tls: Path | None = None

    def client(self) -> Client:
        """Raises NoWorker when no cluster runs, ConfigError for a token or CA file that cannot work."""
        address, tls = self._reach()
        return Client(address, token=self.token, tls=tls, timeout=self.timeout)

    def async_client(self, max_retries: int) -> AsyncClient:
        """As `client`; each failed call is tried `max_retries` times more."""
        address, tls = self._reach()
        return AsyncClient(address, token=self.token, tls=tls, timeout=self.timeout, max_retries=max_retries)

    def authorities(self) -> ssl.SSLContext | None:
        """Whom to trust over HTTPS, by `tls`; None: those known here. Raises ConfigError for what is no CA file."""
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
