"""Channels and servers with the gRPC options and the TLS (`Wire`) that Baton relies on.

A frozen peer is only detected with `grpc.http2.ping_timeout_ms`: the two usual keepalive options alone let a call hang.
A listener does not share its port (`grpc.so_reuseport`) by default, so a port in use is an error. `bind` reports
the reason of a failure.

  client -> router.grpc                            the server has a certificate, the client a token
  operator -> router.admin                         both have a certificate of the cluster's CA, and a token is sent
  router, operator -> worker, prefill -> decode    both have a certificate of the cluster's CA
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from baton.errors import ConfigError
from baton.limits import (
    INTERNAL_RECEIVE_BYTES,
    MAX_CALLS_PER_CONNECTION,
    MAX_GRPC_CONNECTIONS,
    MAX_HANDSHAKE_SECONDS,
    MAX_IDLE_SECONDS,
    PUBLIC_RECEIVE_BYTES,
    SEND_BYTES,
)
from baton.rpc.message_timeout import MessageTimeout

if TYPE_CHECKING:
    from baton.config.schema import TlsConfig


Options = list[tuple[str, Any]]
Credentials: TypeAlias = "grpc.ChannelCredentials | None"  # None means plaintext
_SOCKET_PATH_BYTES = 107  # of sockaddr_un
_FILES_SHARE = 8  # a listener may use one of so many open files
PENDING_CALLS, PENDING_S = 1 << 14, 600  # calls that the event loop has not taken yet


@dataclass(frozen=True, slots=True)
class Link:
    """Settings of one kind of connection. A frozen peer is detected within keepalive_s + ping_timeout_s, and one that
    accepts a connection but does not answer within connect_s.
    """

    receive_bytes: int
    keepalive_s: float = 10.0
    ping_timeout_s: float = 5.0
    connect_s: float = 5.0


PUBLIC = Link(PUBLIC_RECEIVE_BYTES)
INTERNAL = Link(INTERNAL_RECEIVE_BYTES)


def channel_options(link: Link, *, proxy: bool = False, name: str = "") -> Options:
    """Return the options of a client. `proxy`: use http_proxy of the environment. `name`: as in `Wire`."""
    return [
        *_common_options(link),
        ("grpc.enable_http_proxy", int(proxy)),
        ("grpc.min_reconnect_backoff_ms", round(link.connect_s * 1000)),  # of one attempt, by default 20 s
        ("grpc.initial_reconnect_backoff_ms", 100),  # reconnect soon: the default waits up to 120 s
        ("grpc.max_reconnect_backoff_ms", 2000),
        *([("grpc.ssl_target_name_override", name)] if name else []),
    ]


def server_options(link: Link, *, share_port: bool = False) -> Options:
    """Return the options of a server. By default gRPC closes an idle connection after three pings of the client."""
    from baton.network import open_files  # servers only: the SDK has no psutil

    return [
        *_common_options(link),
        ("grpc.so_reuseport", int(share_port)),
        ("grpc.http2.min_ping_interval_without_data_ms", 200),
        ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
        # By default, a silent connection is kept for two minutes. Further connections are closed immediately.
        ("grpc.server_handshake_timeout_ms", round(MAX_HANDSHAKE_SECONDS * 1000)),
        ("grpc.max_connection_idle_ms", round(MAX_IDLE_SECONDS * 1000)),
        ("grpc.max_allowed_incoming_connections", min(MAX_GRPC_CONNECTIONS, max(1, open_files() // _FILES_SHARE))),
        # gRPC would cancel calls of a burst before a handler could queue or reject them: from 1000 on, or after 30 s.
        ("grpc.server.max_pending_requests", PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * PENDING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", PENDING_S),
    ]


def _common_options(link: Link) -> Options:
    return [
        ("grpc.max_receive_message_length", link.receive_bytes),
        ("grpc.max_send_message_length", SEND_BYTES),
        ("grpc.keepalive_time_ms", round(link.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(link.ping_timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", round(link.ping_timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),  # 0 means no limit
    ]


def aio_channel(
    address: str, *, link: Link = INTERNAL, credentials: Credentials = None, proxy: bool = False, name: str = ""
) -> grpc.aio.Channel:
    """Return an asyncio channel to `host:port` for this loop; connects on first use. `name`: as in `Wire`."""
    options = channel_options(link, proxy=proxy, name=name)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def sync_channel(
    address: str, *, link: Link = INTERNAL, credentials: Credentials = None, proxy: bool = False, name: str = ""
) -> grpc.Channel:
    """Return a thread-safe blocking channel to `host:port`; connects on first use. `name`: as in `Wire`."""
    options = channel_options(link, proxy=proxy, name=name)
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def aio_server(
    *, link: Link = INTERNAL, interceptors: Sequence[grpc.aio.ServerInterceptor] = (), share_port: bool = False
) -> grpc.aio.Server:
    """Return a server without services: add them, then `bind`, then `await server.start()`. `share_port`: other
    processes with this option may listen on the same port; the kernel spreads connections.
    """
    options = server_options(link, share_port=share_port)
    return grpc.aio.server(interceptors=[MessageTimeout(), *interceptors], options=options)


def bind(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None, *, key: str = ""
) -> str:
    """Listen on `host:port` (port 0: any free one) and return the address with the bound port. Raises ConfigError with
    the key of the cluster file, the address and the reason: the port is in use, or the host is not one of this machine.
    """
    host, _, port = address.rpartition(":")
    wrong = f"{key}: cannot listen on" if key else "cannot listen on"
    if not host or not port.isdecimal() or int(port) > 65535:  # gRPC would wrap larger ports
        raise ConfigError(f"{wrong} {address!r}: must be host:port, the port 0 to 65535")
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(f"{wrong} {address}: {_why(host, int(port))}") from error
    return f"{host}:{bound}"


def bind_path(server: grpc.aio.Server, path: str) -> str:
    """Listen on a Unix socket at `path`, which must not exist. Returns its target. Raises ConfigError."""
    if len(path.encode()) > _SOCKET_PATH_BYTES:
        raise ConfigError(f"cannot listen on {path}: a socket's path has at most {_SOCKET_PATH_BYTES} bytes")
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {path}: {error}") from error
    return f"unix:{path}"


def from_here(address: str) -> str:
    """Return a local listener's address for this machine: loopback for 0.0.0.0, because no certificate covers that."""
    host, _, port = address.rpartition(":")
    return {"0.0.0.0": f"127.0.0.1:{port}", "[::]": f"[::1]:{port}", "::": f"[::1]:{port}"}.get(host, address)


def _why(host: str, port: int) -> str:
    """Return why a bind failed, by binding a plain socket, because gRPC does not report the reason."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:
            probe.bind(found[0][4])
    except (OSError, OverflowError) as error:
        return str(error)
    return "gRPC gave no reason"


@dataclass(frozen=True, slots=True)
class Wire:
    """The connections between processes of a cluster: TLS with these PEM texts, or plaintext without them. `name`: the
    name in a peer's certificate; default: the host. `repr` contains no keys or certificates.
    """

    ca: bytes = field(default=b"", repr=False)
    cert: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    name: str = ""

    @classmethod
    def of(cls, tls: TlsConfig | None) -> Wire:
        """Read the files that the cluster file names. Raises ConfigError naming the key."""
        if tls is None:
            return cls()
        read = {part: _read(f"security.tls.{part}", path) for part, path in tls.files().items()}
        return cls(**read, name=tls.name or "")

    @classmethod
    def of_path(cls, path: str | Path) -> Wire:
        """Read a CA file, or the folder of `baton certs` including its certificate. Raises ConfigError."""
        if not Path(path).is_dir():
            return cls(_read("tls", str(path)))
        ca, cert, key = (_read("tls", f"{path}/{part}.pem") for part in ("ca", "cert", "key"))
        return cls(ca, cert, key)

    @property
    def credentials(self) -> Credentials:
        """The credentials of a client, with its certificate if there is one."""
        if not self.ca:
            return None
        return grpc.ssl_channel_credentials(self.ca, self.key or None, self.cert or None)

    @property
    def public(self) -> grpc.ServerCredentials | None:
        """The credentials of a listener for any client. None means plaintext."""
        return grpc.ssl_server_credentials([(self.key, self.cert)]) if self.cert else None

    @property
    def private(self) -> grpc.ServerCredentials | None:
        """The credentials of a listener for clients with a certificate of the cluster's CA. None means plaintext."""
        if not self.cert:
            return None
        return grpc.ssl_server_credentials([(self.key, self.cert)], self.ca, require_client_auth=True)

    def aio(self, address: str, *, link: Link = INTERNAL) -> grpc.aio.Channel:
        """Return an asyncio channel to any listener of this cluster."""
        return aio_channel(address, link=link, credentials=self.credentials, name=self.name)

    def sync(self, address: str, *, link: Link = INTERNAL) -> grpc.Channel:
        """Return a blocking channel to any listener of this cluster."""
        return sync_channel(address, link=link, credentials=self.credentials, name=self.name)


PLAINTEXT = Wire()


def _read(key: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {path}: cannot be read: {error.strerror}") from None
