"""Bytes of single tokens, for clients that show log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from baton.rpc.v1 import inference_pb2 as pb
from baton.tokenizer import Tokenizer

_FEW = 256  # more are computed in a thread, to keep the event loop free


async def token_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[pb.TokenPiece]:
    """Return the bytes of each token."""
    return _pieces(tokenizer, ids) if len(ids) <= _FEW else await asyncio.to_thread(_pieces, tokenizer, ids)


def _pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[pb.TokenPiece]:
    found = map(tokenizer.piece, ids)
    return [pb.TokenPiece(bytes=raw, special=special) for raw, special in found]
