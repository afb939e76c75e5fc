"""Who speaks to whom over which connection: certificates from files, as gRPC wants them.

client -> router.grpc                                the server shows a certificate, the client a token
operator -> router.admin                             both show one of the cluster's CA, and a token
router, operator -> worker, prefill -> decode        both show one of the cluster's CA
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from baton.errors import ConfigError
from baton.rpc.channel import INTERNAL, Link, aio_channel, sync_channel

if TYPE_CHECKING:
    from baton.config.security import TlsConfig


@dataclass(frozen=True, slots=True)
class Wire:
    """How the processes of a cluster reach each other: by TLS with these PEM texts, or without any in the clear.

    `name`: what a peer's certificate must be for; "": the host that is called. No part of the key is in its `repr`.
    """

    ca: bytes = field(default=b"", repr=False)
    cert: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    name: str = ""

    @classmethod
    def of(cls, tls: TlsConfig | None) -> Wire:
        """From the files of the cluster file. Raises ConfigError naming the key."""
        if tls is None:
            return cls()
        read = {part: _read(f"security.tls.{part}", path) for part, path in tls.files().items()}
        return cls(**read, name=tls.name or "")

    @classmethod
    def of_path(cls, path: str | Path) -> Wire:
        """From a CA file, or from the folder of `baton certs`: then with its certificate. Raises ConfigError."""
        if not Path(path).is_dir():
            return cls(_read("tls", str(path)))
        ca, cert, key = (_read("tls", f"{path}/{part}.pem") for part in ("ca", "cert", "key"))
        return cls(ca, cert, key)

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """Of a client, which shows the certificate if there is one; None: in the clear."""
        if not self.ca:
            return None
        return grpc.ssl_channel_credentials(self.ca, self.key or None, self.cert or None)

    @property
    def public(self) -> grpc.ServerCredentials | None:
        """Of a listener for anybody; None: in the clear."""
        return grpc.ssl_server_credentials([(self.key, self.cert)]) if self.cert else None

    @property
    def private(self) -> grpc.ServerCredentials | None:
        """Of a listener for those with a certificate of the cluster's CA; None: in the clear."""
        if not self.cert:
            return None
        return grpc.ssl_server_credentials([(self.key, self.cert)], self.ca, require_client_auth=True)

    def aio(self, address: str, *, link: Link = INTERNAL) -> grpc.aio.Channel:
        """An asyncio channel to a process of this cluster, of whatever listener."""
        return aio_channel(address, link=link, credentials=self.credentials, name=self.name)

    def sync(self, address: str, *, link: Link = INTERNAL) -> grpc.Channel:
        """A blocking channel to a process of this cluster, of whatever listener."""
        return sync_channel(address, link=link, credentials=self.credentials, name=self.name)


IN_THE_CLEAR = Wire()


def _read(key: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {path}: cannot be read: {error.strerror}") from None
