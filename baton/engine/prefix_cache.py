"""Names for the content of KV blocks, so that equal beginnings of sequences are computed once.

The KV of a block follows from all tokens up to its end, so its name is a chain: digest(previous name, its tokens). The
key of the digest is made from the model and the request's cache scope: in another scope nothing is found, and without
the key nobody can compute a name to try.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from baton.hashing import keyed_digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from baton.core import SequenceSpec

_KEY = b"baton prefix cache, version 1".ljust(32)
_START = b""


def scope_key(fingerprint: str, scope: str, deterministic: bool = False) -> bytes:
    """The 32-byte key of one cache scope of one model: the same in every process. What is cached for deterministic
    requests is computed on a grid, and nothing else is right for them.
    """
    return keyed_digest(_KEY, fingerprint.encode(), scope.encode(), *([b"deterministic"] * deterministic))


def hashable_blocks(spec: SequenceSpec, block_size: int, *, thinks: bool = False) -> int:
    """How many blocks of a request that is to be computed have names: full ones, and one token is left to compute.

    Of a deterministic request only those of its prompt: the bits of what follows come from verify passes. And where the
    model thinks, but not about what it generates: KV behind the prompt is another than that of a prompt with the same
    tokens.
    """
    named = (len(spec) - 1) // block_size
    prompt_only = spec.deterministic or (thinks and not spec.think_while_decoding)
    return min(named, len(spec.prompt) // block_size) if prompt_only else named


def block_hashes_of(spec: SequenceSpec, fingerprint: str, block_size: int, *, thinks: bool) -> Iterator[bytes]:
    """The names of these blocks as workers with this `fingerprint` call them, each made when it is asked for."""
    scope = scope_key(fingerprint, spec.cache_scope, spec.deterministic)
    chain = BlockHashChain(scope, spec.tokens, block_size)
    return (chain.digest(block) for block in range(hashable_blocks(spec, block_size, thinks=thinks)))


class BlockHashChain:
    """The names of a sequence's full blocks, each computed once, when it is first asked for.

    `tokens` may grow, and must not change otherwise.
    """

    __slots__ = ("_block_size", "_digests", "_key", "_tokens")

    def __init__(self, key: bytes, tokens: Sequence[int], block_size: int) -> None:
        self._key = key
        self._tokens = tokens
        self._block_size = block_size
        self._digests: list[bytes] = []

    def digest(self, block: int) -> bytes:
        """The name of block number `block` of the sequence, from 0. Raises IndexError if its tokens are not known."""
        while len(self._digests) <= block:
            self._extend()
        return self._digests[block]

    def digests(self, first: int, end: int) -> list[bytes]:
        """The names of blocks first..end-1, of which there is one at least."""
        self.digest(end - 1)
        return self._digests[first:end]

    def _extend(self) -> None:
        start, size = len(self._digests) * self._block_size, self._block_size
        tokens = self._tokens[start : start + size]
        if len(tokens) < size:
            raise IndexError(f"block {len(self._digests)} is not full: {len(tokens)} of {size} tokens are known")
        before = self._digests[-1] if self._digests else _START
        self._digests.append(keyed_digest(self._key, before, struct.pack(f"<{size}i", *tokens)))
