"""Block hashes, so that equal beginnings of sequences are computed once.

The KV of a block depends on all tokens up to its end, so its hash is a chain: digest(previous hash, its tokens). The
digest has a key, made from the model and the request's cache scope, so another scope finds nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from baton.core import SequenceSpec
from baton.hashing import keyed_digest

_KEY = b"baton prefix cache, version 1".ljust(32)
_START = b""


def scope_key(fingerprint: str, scope: str, deterministic: bool = False) -> bytes:
    """Return the 32-byte key of a cache scope. Deterministic requests can only use KV that was computed on the grid."""
    return keyed_digest(_KEY, fingerprint.encode(), scope.encode(), *([b"deterministic"] * deterministic))


def hashable_blocks(spec: SequenceSpec, block_size: int, *, thinks: bool = False) -> int:
    """Return how many blocks of a new request have hashes: the full ones, but one token is left to compute. Only the
    prompt counts if verify passes set the bits of the rest, or if the model thinks only about the prompt.
    """
    named = (len(spec) - 1) // block_size
    prompt_only = spec.deterministic or (thinks and not spec.think_while_decoding)
    return min(named, len(spec.prompt) // block_size) if prompt_only else named


def block_hashes_of(spec: SequenceSpec, fingerprint: str, block_size: int, *, thinks: bool) -> Iterator[bytes]:
    """Return the block hashes of `spec` for workers with this `fingerprint`, each computed on demand."""
    scope = scope_key(fingerprint, spec.cache_scope, spec.deterministic)
    chain = BlockHashChain(scope, spec.tokens, block_size)
    return (chain.digest(block) for block in range(hashable_blocks(spec, block_size, thinks=thinks)))


class BlockHashChain:
    """Hashes of a sequence's full blocks, each computed once, on demand. `tokens` may grow, but not change."""

    __slots__ = ("_block_size", "_digests", "_key", "_tokens")

    def __init__(self, key: bytes, tokens: Sequence[int], block_size: int) -> None:
        self._key, self._tokens, self._block_size = key, tokens, block_size
        self._digests: list[bytes] = []

    def digest(self, block: int) -> bytes:
        """Return the hash of block number `block`, from 0. Raises IndexError if its tokens are not known."""
        size = self._block_size
        while (number := len(self._digests)) <= block:
            tokens = self._tokens[number * size : (number + 1) * size]
            if len(tokens) < size:
                raise IndexError(f"block {number} is not full: {len(tokens)} of {size} tokens are known")
            before = self._digests[-1] if self._digests else _START
            self._digests.append(keyed_digest(self._key, before, struct.pack(f"<{size}i", *tokens)))
        return self._digests[block]

    def digests(self, first: int, end: int) -> list[bytes]:
        """Return the hashes of blocks first..end-1, at least one."""
        self.digest(end - 1)
        return self._digests[first:end]
