"""Delivery to a client: tokens merged by index, thoughts merged by chunk, and numbered events on its stream.

Thoughts of a model that thinks are not part of the answer: they have no token index, and no token waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from grpc import aio

from baton.core import Finish, PromptPart, Thought, Token, TokenLogprobs
from baton.errors import BatonError, Cancelled, EngineFault
from baton.rpc import convert
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1.common_pb2 import Sampling

Context = aio.ServicerContext[Any, Any]
_SOON_S = 0.01


class Delivery:
    """Merges tokens from several workers by index, so that a client gets each index once, in order and unchanged. The
    prefill worker sends token 0, and the decode worker repeats it. Each later attempt repeats one token, too. `ids` are
    the delivered tokens; the list is append-only.
    """

    def __init__(self, received: Iterable[int] = (), *, keeps_logprobs: bool = False) -> None:
        self.ids: list[int] = list(received)  # a resumed request starts with the client's tokens
        self.logprobs: list[TokenLogprobs] | None = [] if keeps_logprobs else None  # of tokens after those
        self._early: dict[int, Token] = {}  # later indices, held back until the earlier ones arrive

    def merge(self, tokens: Iterable[Token]) -> list[Token]:
        """Return the tokens that are due, in order. Raises EngineFault if two workers contradict each other."""
        ready: list[Token] = []
        for token in tokens:
            if token.index == len(self.ids) and not self._early:
                self.ids.append(token.token_id)
                ready.append(token)
            else:
                self._hold_back(token)
        while len(self.ids) in self._early:
            ready.append(self._early.pop(len(self.ids)))
            self.ids.append(ready[-1].token_id)
        if self.logprobs is not None:
            self.logprobs += [token.logprobs for token in ready if token.logprobs is not None]
        return ready

    def _hold_back(self, token: Token) -> None:
        early = self._early.setdefault(token.index, token) if token.index >= len(self.ids) else None
        first = early.token_id if early else self.ids[token.index]
        if first != token.token_id:
            raise EngineFault(f"workers sent different tokens at index {token.index}: {first} and {token.token_id}")

    def complete(self) -> None:
        """End the stream. Raises EngineFault if an earlier token is missing."""
        if self._early:
            raise EngineFault(f"token {len(self.ids)} is missing, but token {min(self._early)} was received")

    def drop_pending(self) -> None:
        """Drop held-back tokens, because a new attempt computes them again."""
        self._early.clear()


class Thoughts:
    """Merges the thoughts that workers report for one choice, so that each chunk's thought comes once and in order. P
    reports thoughts about the prompt, and those of D may arrive first. A new attempt repeats all; repeated ones are
    dropped. All choices share the prompt, so only choice 0 delivers thoughts about it. `spell` decodes token ids, and
    is None if the client does not want thoughts.
    """

    def __init__(self, choice: int = 0, spell: Callable[[Sequence[int]], str] | None = None) -> None:
        self.tokens = 0  # of all delivered thoughts
        self._choice, self._spell = choice, spell
        self._due = 0  # the next chunk number
        self._anywhere = False
        self._early: dict[int, Thought] = {}  # later chunks, held back until the earlier ones arrive

    def begin(self, prompt_tokens: int, chunk_size: int, *, detached: bool) -> None:
        """Begin an attempt. `chunk_size` is 0 if the model does not think. A `detached` one may start at any chunk."""
        self._early.clear()
        self._anywhere = detached
        if self._choice and chunk_size:
            self._due = max(self._due, prompt_tokens // chunk_size)

    async def deliver(self, client: EventStream, received: list[Thought]) -> None:
        """Send the new ones of `received` to the client, if it wants thoughts, and clear `received`."""
        fresh = self.merge(received) if received else []
        received.clear()
        if (spell := self._spell) is not None:
            for thought in fresh:
                await client.thought(self._choice, thought, spell(thought.token_ids).strip())

    def merge(self, received: Iterable[Thought]) -> list[Thought]:
        for thought in received:
            if self._anywhere:
                self._due, self._anywhere = max(self._due, thought.chunk), False
            if thought.chunk >= self._due:
                self._early.setdefault(thought.chunk, thought)
        fresh = []
        while self._due in self._early:
            fresh.append(self._early.pop(self._due))
            self._due += 1
        self.tokens += sum(len(thought.token_ids) for thought in fresh)
        return fresh

    def complete(self) -> None:
        """End the choice. Raises EngineFault if its client wants thoughts and an earlier one is missing."""
        if self._early and self._spell is not None:
            found = f"one about chunk {min(self._early)} was received"
            raise EngineFault(f"the thought about chunk {self._due} is missing, but {found}")
        self.tokens += sum(len(thought.token_ids) for thought in self._early.values())


class StallTimeout:
    """Ends the request of a client that reads nothing for `stall_s`. One timer serves all clients of a router."""

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s
        self._writing: dict[EventStream, float] = {}  # begin of each write on the loop's clock, the oldest first
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def begins(self, stream: EventStream) -> None:
        """Start the timeout for writing one message. `ends` stops it."""
        self._writing[stream] = now = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(now + self.stall_s, self._check)

    def ends(self, stream: EventStream) -> None:
        self._writing.pop(stream, None)

    def _check(self) -> None:
        self._timer = None
        while self._writing:
            stream, since = next(iter(self._writing.items()))
            if since + self.stall_s > self._loop.time():
                self._timer = self._loop.call_at(since + self.stall_s, self._check)
                return
            del self._writing[stream]
            stream.give_up(Cancelled(f"the client did not read for {self.stall_s:g} s"))


class EventStream:
    """Writes the numbered events of one request, of all its choices. `give_up` ends the request. Events for a slow
    client stay in the mailboxes of its request, which max_tokens bounds. No other request waits.
    """

    def __init__(
        self, context: Context, request_id: str, stall: StallTimeout, give_up: Callable[[BatonError], None]
    ) -> None:
        self.give_up = give_up
        self._context, self._request_id, self._stall = context, request_id, stall
        self._seq = 0
        self._lock = asyncio.Lock()  # choices write concurrently, a stream takes one message at a time
        self._begun: asyncio.Future[None] | None = None  # a gRPC call in progress that has not been awaited
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._opening: asyncio.TimerHandle | None = None  # the deadline for sending it

    def open(self, *metadata: tuple[str, str], within_s: float = _SOON_S) -> None:
        """Send `metadata` with the first event, or alone after `within_s`, because worker commands go first."""
        self._metadata = metadata
        self._opening = asyncio.get_running_loop().call_later(within_s, self._open)

    def _open(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
            self._begin(self._context.send_initial_metadata(self._metadata))

    async def close(self) -> None:
        """Finish pending writes, because gRPC never sends a status that comes during another operation."""
        self._open()
        if self._begun is not None:
            await asyncio.wait([self._begun], timeout=self._stall.stall_s)
            if self._begun.done():
                _ = self._begun.cancelled() or self._begun.exception()  # retrieve its error: the client is gone
            else:
                self._begun.cancel()

    def _begin(self, call: Coroutine[Any, Any, None]) -> None:
        # gRPC reports a finished write through another thread, which takes longer than the request should wait.
        self._begun = asyncio.ensure_future(call)

    async def _end(self) -> None:
        self._open()
        if self._begun is not None:
            await asyncio.shield(self._begun)
            self._begun = None

    async def accepted(
        self,
        prompt_tokens: int,
        cached_tokens: int,
        determinism: str = "",
        defaults: Sampling | None = None,
        in_reasoning: bool = False,
    ) -> None:
        """Start to send Accepted. Returns without waiting for the write, unless the client does not read."""
        event = pb.Accepted(
            prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, defaults=defaults, in_reasoning=in_reasoning
        )
        event.system_fingerprint = determinism
        await self._write(begin=True, accepted=event)

    async def tokens(self, choice: int, tokens: list[Token], *, recorded: bool = False) -> None:
        if tokens:
            await self._write(tokens=convert.tokens_to_public_pb(tokens, choice, recorded=recorded))

    async def thought(self, choice: int, thought: Thought, text: str) -> None:
        event = pb.Thought(choice=choice, chunk=thought.chunk, ids=thought.token_ids, text=text)
        await self._write(thought=event)

    async def prompt_logprobs(self, part: PromptPart) -> None:
        await self._write(prompt_logprobs=convert.prompt_part_to_pb(part))

    async def recovered(self, attempt: int, reason: str) -> None:
        await self._write(recovered=pb.Recovered(attempt=attempt, reason=reason))

    async def finished(self, choice: int, finish: Finish, delivered: int) -> None:
        """Send Finished, after text that was held back for a stop string. That text has no token."""
        if finish.tail:
            await self._write(tokens=convert.tail_to_public_pb(finish.tail, delivered, choice))
        await self._write(finished=convert.finish_to_public_pb(finish, choice))

    async def completed(self, completed: pb.Completed) -> None:
        await self._write(completed=completed)

    async def _write(self, *, begin: bool = False, **event: Any) -> None:
        async with self._lock:  # a choice that waits for its turn is not stalled
            message = pb.GenerateEvent(request_id=self._request_id, seq=self._seq, **event)
            self._seq += 1
            self._stall.begins(self)
            try:
                await self._end()
                if begin:
                    self._begin(self._context.write(message))
                else:
                    await self._context.write(message)
            except aio.InternalError:  # the write failed; gRPC reports the end of the call only to the call's own task
                raise Cancelled("the client has left") from None
            finally:
                self._stall.ends(self)
