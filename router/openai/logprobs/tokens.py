"""Texts and bytes of tokens, and tokens of an answer with their log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from baton.errors import EngineFault
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from router.openai.upstream import Metadata, Upstream

T = TypeVar("T")
_KEPT = 1 << 17  # token texts in memory
_THREAD_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token as it is written after another one, so that a leading space stays. Some are only part of a character."""

    raw: bytes
    special: bool = False

    @property
    def text(self) -> str:
        return self.raw.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its log-probability (None: nothing comes before it) and the likeliest alternatives, best first.
    `offset` is the length of the text before it.
    """

    token: TokenText
    logprob: float | None
    top: tuple[tuple[TokenText, float], ...] = ()
    offset: int = 0


async def in_thread(tokens: int, work: Callable[[], T]) -> T:
    """Return the result of `work` on `tokens`, computed in a thread if they are many."""
    return work() if tokens <= _THREAD_TOKENS else await asyncio.to_thread(work)


def shown_ids(ids: Sequence[int], entries: Sequence[common_pb2.TokenLogprobs]) -> set[int]:
    """Return all tokens and alternatives."""
    return {*ids, *(top.token_id for entry in entries for top in entry.top)}


def _scored(
    ids: Sequence[int], entries: Sequence[common_pb2.TokenLogprobs], texts: dict[int, TokenText]
) -> list[Scored]:
    return [
        Scored(texts[token_id], entry.logprob, tuple((texts[top.token_id], top.logprob) for top in entry.top))
        for token_id, entry in zip(ids, entries, strict=True)
    ]


class TokenTexts:
    """Cache of token texts."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._known: dict[int, TokenText] = {}

    async def scored(
        self, ids: Sequence[int], entries: Sequence[common_pb2.TokenLogprobs], metadata: Metadata
    ) -> list[Scored]:
        """Return one entry per token, or none if the router sent no log-probabilities. Raises BatonError."""
        if not entries:
            return []
        if len(entries) != len(ids):
            raise EngineFault(f"the router sent {len(entries)} logprobs for {len(ids)} tokens")
        texts = await self.of(await in_thread(len(ids), lambda: shown_ids(ids, entries)), metadata)
        return await in_thread(len(ids), lambda: _scored(ids, entries, texts))

    async def of(self, ids: Collection[int], metadata: Metadata) -> dict[int, TokenText]:
        """Return the text of each token. Raises BatonError."""
        texts = {token_id: self._known[token_id] for token_id in ids if token_id in self._known}
        if missing := [token_id for token_id in ids if token_id not in texts]:
            reply = await self._upstream.detokenize(pb.DetokenizeRequest(ids=missing, pieces=True), metadata)
            if len(reply.pieces) != len(missing):
                raise EngineFault("the router is of an older release, which sends no bytes of tokens")
            found = [TokenText(piece.bytes, piece.special) for piece in reply.pieces]
            texts |= dict(zip(missing, found, strict=True))
            self._known |= texts
            while len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
        return texts

    async def decode(self, ids: Sequence[int], metadata: Metadata) -> str:
        """Return the text of all `ids` together. Raises BatonError."""
        return (await self._upstream.detokenize(pb.DetokenizeRequest(ids=ids), metadata)).text
