"""Ed25519 keys of receipts: the private one of the routers, and the public ones of readers. Both are PEM files."""

from __future__ import annotations

import base64
import re
from hashlib import sha256
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from baton.errors import ConfigError, InvalidRequest
from baton.receipts.form import Receipt

CONFIG_KEY = "security.receipt_key"
MAKE = "openssl genpkey -algorithm ed25519 -out FILE"
_PUBLIC = re.compile(rb"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)
_SHOWN = 64  # characters of a wrong name of a key


def key_name(key: Ed25519PublicKey) -> str:
    """Return the name of a key in receipts: the first 16 hex digits of the SHA-256 of its 32 bytes."""
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return f"ed25519:{sha256(raw).hexdigest()[:16]}"


class ReceiptKey:
    """The private key of the routers of a cluster. All of them have the same one."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.name = key_name(key.public_key())

    @classmethod
    def read(cls, path: str | Path) -> ReceiptKey:
        """Read a PEM file (PKCS #8). Raises ConfigError, also if all users of this machine can read the file."""
        data = _read(path, CONFIG_KEY)
        if Path(path).stat().st_mode & 0o007:
            raise ConfigError(f"{CONFIG_KEY}: {path}: all users of this machine can read it: chmod 600 {path}")
        try:
            key = serialization.load_pem_private_key(data, password=None)
        except TypeError:
            raise ConfigError(f"{CONFIG_KEY}: {path}: is encrypted; must be a key without a password") from None
        except (ValueError, UnsupportedAlgorithm):
            raise ConfigError(f"{CONFIG_KEY}: {path}: is no private key in PEM; make one with: {MAKE}") from None
        if not isinstance(key, Ed25519PrivateKey):
            kind = type(key).__name__.lstrip("_")
            raise ConfigError(f"{CONFIG_KEY}: {path}: must be an Ed25519 key, got {kind}; make one with: {MAKE}")
        return cls(key)

    def sign(self, receipt: Receipt) -> Receipt:
        """Return the receipt with the name of this key and its signature."""
        named = receipt.model_copy(update={"key": self.name})
        signature = self._key.sign(named.signed_bytes())
        return named.model_copy(update={"signature": base64.b64encode(signature).decode()})

    def public(self) -> PublicKeys:
        return PublicKeys([self._key.public_key()])


class PublicKeys:
    """Public keys by name. Several are needed while a cluster changes its key."""

    def __init__(self, keys: list[Ed25519PublicKey]) -> None:
        self._keys = {key_name(key): key for key in keys}

    @classmethod
    def read(cls, path: str | Path) -> PublicKeys:
        """Read a PEM file with one or more public keys. Raises ConfigError."""
        found = []
        for block in _PUBLIC.findall(_read(path, "--public-key")):
            try:
                key = serialization.load_pem_public_key(block)
            except (ValueError, UnsupportedAlgorithm):
                raise ConfigError(f"--public-key: {path}: has a block that is no public key") from None
            if not isinstance(key, Ed25519PublicKey):
                raise ConfigError(f"--public-key: {path}: must have Ed25519 keys only")
            found.append(key)
        if not found:
            raise ConfigError(f"--public-key: {path}: has no public key in PEM")
        return cls(found)

    def check(self, receipt: Receipt) -> None:
        """Check the signature. Raises InvalidRequest if it is wrong, or if no key here has the receipt's name."""
        if (key := self._keys.get(receipt.key)) is None:
            known = ", ".join(self._keys)
            raise InvalidRequest.of("receipt.key", f"{receipt.key[:_SHOWN]!r} is not a given public key ({known})")
        try:
            key.verify(base64.b64decode(receipt.signature, validate=True), receipt.signed_bytes())
        except (InvalidSignature, ValueError):  # ValueError: it is not base64, or not ASCII
            text = f"is not that of {receipt.key} for this receipt: a member was changed, or another key signed it"
            raise InvalidRequest.of("receipt.signature", text) from None


def _read(path: str | Path, key: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {path}: cannot be read: {error.strerror}") from None
