"""Prompts that come back with their answer: as text with `echo`, and with log-probabilities of their tokens."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from baton.errors import InvalidRequest
from baton.limits import MAX_PROMPT_SCORES
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from router.openai.logprobs.tokens import Scored, TokenText, TokenTexts, in_thread, shown_ids
from router.openai.upstream import Metadata


@dataclass(frozen=True, slots=True)
class Wanted:
    """The parts of a prompt that come back. `echo` returns its text, with `echo_top` alternatives per token. `vllm_top`
    is the number of alternatives in vLLM's form. None returns no log-probabilities.
    """

    echo: bool = False
    echo_top: int | None = None
    vllm_top: int | None = None

    @property
    def top(self) -> int | None:
        """Number of alternatives to request from the router."""
        return max((each for each in (self.echo_top, self.vllm_top) if each is not None), default=None)

    def check(self, tokens: int, choices: int) -> None:
        """Raise InvalidRequest if the log-probabilities of prompts with `tokens` in total are too many."""
        if self.top is None or (size := tokens * (self.top + 1) * choices) <= MAX_PROMPT_SCORES:
            return
        field = "prompt_logprobs" if self.top == self.vllm_top else "logprobs"
        asked = f"{tokens} prompt tokens x ({self.top} + 1) x n ({choices})"
        raise InvalidRequest.of(field, f"at most {MAX_PROMPT_SCORES} log-probabilities of prompts, got {size}: {asked}")


class ReturnedPrompt:
    """The prompt of one call: its parts as they come, then its forms for the answer."""

    def __init__(self, request: pb.GenerateRequest, texts: TokenTexts, metadata: Metadata) -> None:
        self._request, self._texts, self._metadata = request, texts, metadata
        self._ids: list[int] = []
        self._ranks: list[int] = []
        self._entries: list[common_pb2.TokenLogprobs] = []

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, part: common_pb2.PromptLogprobs) -> None:
        self._ids += part.ids
        self._ranks += part.ranks
        self._entries += part.logprobs

    async def text(self) -> str:
        """Return the prompt as text. Raises BatonError."""
        given = self._request
        return given.text if given.HasField("text") else await self._texts.decode(given.token_ids.ids, self._metadata)

    async def scored(self, text: str, top: int) -> list[Scored]:
        """Return all tokens, with offsets into `text` and at most `top` alternatives. Raises BatonError."""
        found = await self._texts.scored(self._ids, self._entries, self._metadata)
        return await in_thread(len(self), lambda: self._placed(found, text, top))

    def _placed(self, found: Sequence[Scored], text: str, top: int) -> list[Scored]:
        places = _offsets([each.token for each in found], text)
        rows = zip(found, self._ranks, places, strict=True)
        return [
            replace(each, logprob=each.logprob if rank else None, top=each.top[:top], offset=place)
            for each, rank, place in rows
        ]

    async def vllm(self, top: int) -> orjson.Fragment:
        """Return vLLM's form: for each token an object by token id, for the first one null. Raises BatonError."""
        ids = await in_thread(len(self), lambda: shown_ids(self._ids, self._entries))
        texts = await self._texts.of(ids, self._metadata)
        # One by one, because orjson holds the interpreter's lock.
        rows = await in_thread(len(self), lambda: [orjson.dumps(each) for each in self._vllm_rows(texts, top)])
        return orjson.Fragment(b"[" + b",".join(rows) + b"]")

    def _vllm_rows(self, texts: Mapping[int, TokenText], top: int) -> Iterator[dict[str, Any] | None]:
        for token_id, rank, entry in zip(self._ids, self._ranks, self._entries, strict=True):
            best = [(each.token_id, each.logprob, place) for place, each in enumerate(entry.top[:top], 1)]
            rows = dict.fromkeys([(token_id, entry.logprob, rank), *(row for row in best if row[0] != token_id)])
            shown = {str(i): {"logprob": value, "rank": at, "decoded_token": texts[i].text} for i, value, at in rows}
            yield shown if rank else None


def _offsets(tokens: Sequence[TokenText], text: str) -> list[int]:
    """Return where each token begins in `text`. Some tokenizers drop a space at its start."""
    decoder, length, found = codecs.getincrementaldecoder("utf-8")("replace"), 0, list[int]()
    whole: list[str] = []
    for token in tokens:
        found.append(length)
        if not token.special:
            whole.append(decoder.decode(token.raw))
            length += len(whole[-1])
    added = length - len(text) if "".join(whole).endswith(text) else 0
    return [min(max(place - added, 0), len(text)) for place in found]
