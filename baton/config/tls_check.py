"""Checks the certificate files of a cluster by an in-memory handshake."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from baton.config.schema import TlsConfig
from baton.errors import ConfigError

ROUNDS = 10  # rounds of messages; a handshake takes two


@dataclass(frozen=True, slots=True)
class Certificate:
    """Names in a certificate, and its end (as OpenSSL writes it)."""

    names: tuple[str, ...]
    until: str

    @property
    def seconds_left(self) -> float:
        return ssl.cert_time_to_seconds(self.until) - time.time()


def check_tls(tls: TlsConfig | None) -> Certificate | None:
    """Check that two ends with these files accept each other; None without TLS. Raises ConfigError naming the key."""
    if tls is None:
        return None
    for part, path in tls.files().items():
        _read(f"security.tls.{part}", path)
    server, client = _context(tls, ssl.PROTOCOL_TLS_SERVER), _context(tls, ssl.PROTOCOL_TLS_CLIENT)
    server.verify_mode, client.check_hostname = ssl.CERT_REQUIRED, False
    try:
        shown = _shake_hands(server, client)
    except ssl.SSLError as error:
        why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason
        raise ConfigError(f"security.tls.cert: {tls.cert}: peers would reject it: {why} ({tls.ca})") from None
    certificate = Certificate(_names(shown), str(shown.get("notAfter", "")))
    if tls.name is not None and tls.name not in certificate.names:
        raise ConfigError(f"security.tls.name: {tls.name!r} is not in {tls.cert}, whose names are {certificate.names}")
    return certificate


def _read(key: str, path: str) -> None:
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {path}: cannot be read: {error.strerror}") from None
    if b"-----BEGIN " not in text:
        raise ConfigError(f"{key}: {path}: not a PEM file")
    if key.endswith(".key") and b"ENCRYPTED" in text:
        raise ConfigError(f"{key}: {path}: is encrypted; must be a key without a password")


def _context(tls: TlsConfig, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    _load("ca", tls.ca, lambda: context.load_verify_locations(tls.ca))
    only = ssl.SSLContext(protocol)  # distinguishes a bad certificate from a bad key
    _load("cert", tls.cert, lambda: only.load_verify_locations(tls.cert))
    _load("key", tls.key, lambda: context.load_cert_chain(tls.cert, tls.key))
    return context


def _load(part: str, path: str, load: Callable[[], None]) -> None:
    try:
        load()
    except ssl.SSLError as error:
        text = "is not the key of security.tls.cert" if "MISMATCH" in str(error.reason) else "cannot be used"
        raise ConfigError(f"security.tls.{part}: {path}: {text} ({error.reason or 'not PEM'})") from None


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, object]:
    """Return the server's certificate. Raises SSLError from the end that rejects the other."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)
    done = [False, False]
    for turn in range(2 * ROUNDS):
        if all(done):
            break
        with suppress(ssl.SSLWantReadError):
            ends[turn % 2].do_handshake()
            done[turn % 2] = True
    return dict(ends[0].getpeercert() or {})


def _names(shown: dict[str, object]) -> tuple[str, ...]:
    found = shown.get("subjectAltName", ())
    return tuple(str(name) for _, name in found) if isinstance(found, tuple) else ()
