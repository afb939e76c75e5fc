"""One request of a load, before anybody has sent it, and what many of them are together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request comes and how long it is. Two requests begin alike for as long as their `blocks` are the same.

    `max_tokens` new tokens are asked for. Each of `blocks` is the id of what `block_tokens` tokens of the prompt are;
    the last one may be cut by the end of the prompt, and what is behind the last one is the request's own.
    """

    at_s: float  # seconds from the start of the load
    prompt_tokens: int  # 0: only the server knows, which gets `prompt` as text
    max_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0
    prompt: str | tuple[int, ...] | None = None  # None: any tokens will do

    @property
    def total_tokens(self) -> int:
        """What the KV of the whole request takes."""
        return self.prompt_tokens + self.max_tokens

    def within(self, tokens: int) -> Arrival:
        """The same one, with its prompt cut, and the answer if need be, so that the whole has at most `tokens` (2 or
        more). A prompt that was written out stays as it is.
        """
        if self.total_tokens <= tokens or self.prompt is not None:
            return self
        answer = min(self.max_tokens, tokens - 1)
        return replace(self, prompt_tokens=min(self.prompt_tokens, tokens - answer), max_tokens=answer)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a load asks for. `shared`: the share of all prompt tokens that an endless prefix cache would find."""

    requests: int
    span_s: float  # from the first to the last
    prompt_tokens: int
    max_tokens: int
    longest: int  # tokens of a prompt with its answer
    shared: float

    @property
    def rate(self) -> float:
        """Requests per second; 0 when all come at once."""
        return (self.requests - 1) / self.span_s if self.span_s else 0.0


def summary(load: Iterable[Arrival]) -> Summary:
    """Count what is in `load`, in the order of arrival. The beginning of a request is cached as soon as it came."""
    count = prompts = answers = longest = found = 0
    first = last = 0.0
    seen: set[int] = set()
    for one in load:
        first, last = (one.at_s if count == 0 else first), one.at_s
        count += 1
        prompts += one.prompt_tokens
        answers += one.max_tokens
        longest = max(longest, one.total_tokens)
        found += min(_known(one, seen) * one.block_tokens, one.prompt_tokens)
        seen.update(one.blocks)
    return Summary(count, last - first, prompts, answers, longest, found / prompts if prompts else 0.0)


def _known(one: Arrival, seen: set[int]) -> int:
    """How many blocks in a row from the beginning."""
    return next((place for place, block in enumerate(one.blocks) if block not in seen), len(one.blocks))
