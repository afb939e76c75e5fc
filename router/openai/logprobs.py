"""Texts of single tokens, which label logprobs. Each token is requested from the router once."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from baton.errors import EngineFault, InvalidRequest
from baton.rpc.v1 import common_pb2, inference_pb2
from router.openai.upstream import Metadata, Upstream

KEPT = 1 << 17
_AT_ONCE = 32
_NO_TEXT = "\ufffd"  # for bytes that are only part of a character


@dataclass(frozen=True, slots=True)
class Scored:
    """A token as text with its log-probability, and the likeliest alternatives, best first."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


class TokenTexts:
    """Cache of the last `kept` token texts, as spelled after another token so that a leading space stays."""

    def __init__(self, upstream: Upstream, kept: int = KEPT) -> None:
        self._upstream = upstream
        self._kept = kept
        self._known: dict[int, str] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def scored(self, tokens: inference_pb2.Tokens, metadata: Metadata) -> list[Scored]:
        """Return one entry per token, or none if the router sent no logprobs. Raises BatonError."""
        entries: Sequence[common_pb2.TokenLogprobs] = tokens.logprobs
        if not entries:
            return []
        if len(entries) != len(tokens.ids):
            raise EngineFault(f"the router sent {len(entries)} logprobs for {len(tokens.ids)} tokens")
        texts = await self._texts({*tokens.ids, *(top.token_id for entry in entries for top in entry.top)}, metadata)
        return [
            Scored(texts[token_id], entry.logprob, tuple((texts[top.token_id], top.logprob) for top in entry.top))
            for token_id, entry in zip(tokens.ids, entries, strict=True)
        ]

    async def _texts(self, ids: Collection[int], metadata: Metadata) -> dict[int, str]:
        texts = {token_id: self._known[token_id] for token_id in ids if token_id in self._known}
        missing = [token_id for token_id in ids if token_id not in texts]
        spelled = await asyncio.gather(*(self._ask(token_id, metadata) for token_id in missing))
        found = dict(zip(missing, spelled, strict=True))
        self._known |= found
        while len(self._known) > self._kept:
            del self._known[next(iter(self._known))]
        return texts | found

    async def _ask(self, token_id: int, metadata: Metadata) -> str:
        """Subtract one token's text from that of two, because some tokenizers drop a space at the start."""
        try:
            async with self._slots:
                once = await self._upstream.decode([token_id], metadata)
                twice = await self._upstream.decode([token_id, token_id], metadata)
        except InvalidRequest:  # models have more logits than their tokenizer has tokens
            return _NO_TEXT
        return twice.removeprefix(once) if twice.startswith(once) else once


def bytes_of(text: str) -> list[int] | None:
    """Return the UTF-8 bytes of a token's text, or None if the token is only part of a character."""
    return None if _NO_TEXT in text else list(text.encode())
