"""Digests, each for one purpose: `frame_digest` protects bytes on a wire, `keyed_digest` makes content addresses.

xxh3 (128 bit) is fast enough to be always on. It detects accidents, but no attacker with control of the KV network;
use the encrypted transport against that. Content addresses use keyed blake3.
"""

from __future__ import annotations

from collections.abc import Iterable

import blake3
import xxhash


def frame_digest(data: bytes | memoryview) -> bytes:
    """Return 16 bytes over `data` in wire order."""
    return xxhash.xxh3_128_digest(data)


def keyed_digest(key: bytes, *parts: bytes) -> bytes:
    """Return 32 bytes over the length-prefixed `parts` under a 32-byte `key` (blake3 keyed mode)."""
    hasher = blake3.blake3(key=key)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def fingerprint(parts: Iterable[str]) -> str:
    """Return 24 hex digits for a set of facts, for example those that make two workers' KV interchangeable."""
    return blake3.blake3("\x1f".join(parts).encode()).hexdigest()[:24]
