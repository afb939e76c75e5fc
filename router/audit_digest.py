"""The audit digest of a deterministic request. Two answers have equal digests only if every delivered bit is equal.

SHA-256 of the following bytes, written as 64 hex digits. All numbers are little-endian; `u32`, `u64` and `i32` are
integers of so many bits, `f32` is the pattern of 32 bits of an IEEE 754 number, a flag is one byte, 0 or 1. A list is
its length (u32), then its items; a text is the list of its UTF-8 bytes.

1. the 14 bytes "baton audit 1\\n"
2. the prompt: list of u32
3. what was asked, defaults filled in: max_tokens (u32), min_tokens (u32), temperature (f32), top_p (f32), top_k (u32),
   min_p (f32), seed (flag; if 1, u64; 0 where the temperature is 0: nothing is drawn), repetition_penalty (f32),
   presence_penalty (f32), frequency_penalty (f32), stop (list of texts), stop_token_ids (list of u32),
   ignore_eos (flag), logit_bias (by token id; list of u32 and f32), logprobs (i32; -1: none), and only if there are bad
   words: bad_words (list of texts)
4. the answers: their number (u32), then of each: tokens (list of u32), logprobs (list of: that of the token as f32, and
   a list of u32 and f32, the best tokens and theirs; empty unless asked for)
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from baton.core import Sampling, TokenLogprobs

_MAGIC = b"baton audit 1\n"


class Delivered(NamedTuple):
    """One answer as delivered to the client. `logprobs` is empty, or has one entry per token."""

    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()


def audit_digest(prompt: Sequence[int], sampling: Sampling, answers: Sequence[Delivered]) -> str:
    """Return the audit digest by the rules of this module. `sampling` must be complete, including its seed."""
    digest = sha256(_MAGIC)
    for part in (_ids(prompt), *_sampling(sampling), _u32(len(answers)), *map(_answer, answers)):
        digest.update(part)
    return digest.hexdigest()


def joined(digests: Sequence[str]) -> str:
    """Combine digests of related requests: SHA-256 of all in order, or "" if one is missing. One stays unchanged."""
    if not all(digests) or not digests[1:]:
        return digests[0] if len(digests) == 1 else ""
    return sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()


def _sampling(asked: Sampling) -> Iterator[bytes]:
    yield struct.pack("<IIff", asked.max_tokens, asked.min_tokens, asked.temperature, asked.top_p)
    yield struct.pack("<If", asked.top_k, asked.min_p)
    drawn = asked.temperature > 0 and asked.seed is not None
    yield struct.pack("<BQ", 1, asked.seed) if drawn else b"\0"
    yield struct.pack("<fff", asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty)
    yield _list(_text(text) for text in asked.stop)
    yield _ids(asked.stop_token_ids)
    yield struct.pack("<B", asked.ignore_eos)
    yield _pairs(asked.logit_bias)
    yield struct.pack("<i", -1 if asked.logprobs is None else asked.logprobs)
    yield _list(_text(text) for text in asked.bad_words) if asked.bad_words else b""


def _answer(answer: Delivered) -> bytes:
    scores = _list(struct.pack("<f", each.logprob) + _pairs(each.top) for each in answer.logprobs)
    return _ids(answer.tokens) + scores


def _u32(number: int) -> bytes:
    return struct.pack("<I", number)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return _u32(len(encoded)) + encoded


def _list(items: Iterable[bytes]) -> bytes:
    found = list(items)
    return _u32(len(found)) + b"".join(found)


def _ids(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<I{len(ids)}I", len(ids), *ids)


def _pairs(pairs: Sequence[tuple[int, float]]) -> bytes:
    return _list(struct.pack("<If", *pair) for pair in pairs)
