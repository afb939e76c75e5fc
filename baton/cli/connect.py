"""Which router the commands ask that send requests, and how they say who they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.cli.up import find_cluster
from baton.client import AsyncClient, Client


@dataclass(frozen=True, slots=True)
class Router:
    """`target`, or the running cluster called `name`. `tls`: a CA file, or `system` for the authorities known here."""

    name: str | None
    target: str | None
    timeout: float  # seconds for each call
    token: str | None = field(default=None, repr=False)
    tls: str | None = None

    def client(self) -> Client:
        """Raises NoWorker when no cluster runs, ConfigError for a token or CA file that cannot work."""
        return Client(self._address(), token=self.token, tls=self._tls(), timeout=self.timeout)

    def async_client(self, max_retries: int) -> AsyncClient:
        """As `client`; each failed call is tried `max_retries` times more."""
        return AsyncClient(
            self._address(), token=self.token, tls=self._tls(), timeout=self.timeout, max_retries=max_retries
        )

    def _address(self) -> str:
        return self.target or find_cluster(self.name).grpc

    def _tls(self) -> str | bool | None:
        return True if self.tls == "system" else self.tls
