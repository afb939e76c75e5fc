"""Credentials for a router: the certificates of `--tls` or of the local cluster, and a token."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from baton.cluster.state_dir import ClusterState, StateFolder
from baton.config import ClusterConfig, load_config
from baton.rpc.channel import IN_THE_CLEAR, Wire
from router.auth.tokens import read_tokens

TOKEN_VARIABLE = "BATON_TOKEN"  # not an option, because all users of a machine see command lines


@dataclass(frozen=True, slots=True)
class Target:
    """The certificates and the token for a cluster."""

    wire: Wire = IN_THE_CLEAR
    token: str | None = field(default=None, repr=False)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The gRPC metadata of each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def channel(self, address: str) -> grpc.Channel:
        """Open a channel to any listener of the cluster."""
        return self.wire.sync(address)


NO_REACH = Target()  # unencrypted, without a token


def reach_of(config: ClusterConfig) -> Target:
    """Return the credentials for a cluster by its file. Raises ConfigError."""
    return Target(Wire.of(config.security.tls), os.environ.get(TOKEN_VARIABLE) or None)


def check_tokens(config: ClusterConfig) -> None:
    """Check the tokens file before anything starts, because the router will read it. Raises ConfigError."""
    if config.security.tokens is not None:
        read_tokens(config.security.tokens)


def find_reach(cluster: ClusterState | None, tls: Path | None) -> Target:
    """Return the credentials by `tls` (a folder of `baton certs`, or a CA file) or `cluster`. Raises ConfigError."""
    token = os.environ.get(TOKEN_VARIABLE) or None
    if tls is not None:
        return Target(Wire.of_path(tls), token)
    file = StateFolder(cluster.name).config if cluster else None
    return reach_of(load_config(file)) if file is not None and file.exists() else Target(token=token)
