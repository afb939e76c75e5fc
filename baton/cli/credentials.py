"""What a command shows to a router: the certificates of `--tls`, or of the cluster that runs here, and a token."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from baton.cluster.state_dir import ClusterState, StateFolder
from baton.config import ClusterConfig, load_config
from baton.rpc.channel import IN_THE_CLEAR, Wire
from router.auth.tokens import read_tokens

TOKEN_VARIABLE = "BATON_TOKEN"  # no option: everybody on a machine sees a command line


@dataclass(frozen=True, slots=True)
class Target:
    """How to reach a cluster."""

    wire: Wire = IN_THE_CLEAR
    token: str | None = field(default=None, repr=False)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """For each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def channel(self, address: str) -> grpc.Channel:
        """To any listener of the cluster's."""
        return self.wire.sync(address)


NO_REACH = Target()  # in the clear, and without a token


def reach_of(config: ClusterConfig) -> Target:
    """Of a cluster whose file is known. Raises ConfigError."""
    return Target(Wire.of(config.security.tls), os.environ.get(TOKEN_VARIABLE) or None)


def check_tokens(config: ClusterConfig) -> None:
    """Before anything is started: the router will read the same file. Raises ConfigError."""
    if config.security.tokens is not None:
        read_tokens(config.security.tokens)


def find_reach(cluster: ClusterState | None, tls: Path | None) -> Target:
    """`tls`: a folder of `baton certs`, or a CA file; without it, as the running `cluster` says. Raises ConfigError."""
    token = os.environ.get(TOKEN_VARIABLE) or None
    if tls is not None:
        return Target(Wire.of_path(tls), token)
    file = StateFolder(cluster.name).config if cluster else None
    return reach_of(load_config(file)) if file is not None and file.exists() else Target(token=token)
