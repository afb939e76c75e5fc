"""What a client has been sent: tokens merged by index, and numbered events on its stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from grpc import aio

from baton.core import Finish, Thought, Token, TokenLogprobs
from baton.errors import BatonError, Cancelled, EngineFault
from baton.rpc import convert
from baton.rpc.v1 import inference_pb2 as pb

Context = aio.ServicerContext[Any, Any]
_SOON_S = 0.01


class Delivery:
    """Merges tokens of any number of witnesses by index. `ids` are those delivered, and grow only at the end. Pure.

    Token 0 has two witnesses: the prefill worker says it first, the decode worker's first message repeats it. Every
    later attempt repeats one token in the same way. Whatever order that arrives in, a client sees each index once and
    in order, and what it has seen never changes.
    """

    def __init__(self, received: Iterable[int] = ()) -> None:
        self.ids: list[int] = list(received)  # a client that resumes has these
        self.logprobs: list[TokenLogprobs] | None = None  # of the others, if they are kept
        self._early: dict[int, Token] = {}  # later indices, held back until the earlier ones are there

    def merge(self, tokens: Iterable[Token]) -> list[Token]:
        """Those that the client gets now, in order. Raises EngineFault when two witnesses contradict each other."""
        ready: list[Token] = []
        for token in tokens:
            if token.index == len(self.ids) and not self._early:  # the next one, as nearly always
                self.ids.append(token.token_id)
                ready.append(token)
            else:
                self._hear(token)
        while len(self.ids) in self._early:
            ready.append(self._early.pop(len(self.ids)))
            self.ids.append(ready[-1].token_id)
        if self.logprobs is not None:
            self.logprobs += [token.logprobs for token in ready if token.logprobs is not None]
        return ready

    def _hear(self, token: Token) -> None:
        known = self._early.setdefault(token.index, token) if token.index >= len(self.ids) else None
        said = known.token_id if known else self.ids[token.index]
        if said != token.token_id:
            raise EngineFault(f"workers contradict each other on token {token.index}: {said} and {token.token_id}")

    def complete(self) -> None:
        """The stream is said to have ended here. Raises EngineFault when an earlier token never came."""
        if self._early:
            raise EngineFault(f"token {len(self.ids)} never came, token {min(self._early)} did")

    def drop_pending(self) -> None:
        """A new attempt begins: what was held back is computed again."""
        self._early.clear()


class StallTimeout:
    """A client that takes nothing for `stall_s` is given up: one timer for all of a router's clients."""

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s
        self._writing: dict[EventStream, float] = {}  # since when, on the loop's clock; the longest first
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def begins(self, stream: EventStream) -> None:
        """It writes one message. Ends with `ends`."""
        self._writing[stream] = now = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(now + self.stall_s, self._look)

    def ends(self, stream: EventStream) -> None:
        self._writing.pop(stream, None)

    def _look(self) -> None:
        self._timer = None
        while self._writing:
            stream, since = next(iter(self._writing.items()))
            if since + self.stall_s > self._loop.time():
                self._timer = self._loop.call_at(since + self.stall_s, self._look)
                return
            del self._writing[stream]
            stream.give_up(Cancelled(f"the client did not read for {self.stall_s:g} s"))


class EventStream:
    """Writes one request's numbered events, of all its choices; `give_up` ends the request.

    What a slow client has not taken waits in the mailboxes of its request, which max_tokens bounds; nobody else waits.
    """

    def __init__(
        self, context: Context, request_id: str, patience: StallTimeout, give_up: Callable[[BatonError], None]
    ) -> None:
        self.give_up = give_up
        self._context = context
        self._request_id = request_id
        self._patience = patience
        self._seq = 0
        self._turn = asyncio.Lock()  # choices write side by side, a stream takes one message at a time
        self._begun: asyncio.Future[None] | None = None  # a call of gRPC that is under way, and that nobody waited for
        self._metadata: tuple[tuple[str, str], ...] = ()  # to be sent before everything else
        self._opening: asyncio.TimerHandle | None = None  # until then

    def open(self, *metadata: tuple[str, str], within_s: float = _SOON_S) -> None:
        """Send `metadata` before the first event, or alone when there is none soon: workers hear of a request first."""
        self._metadata = metadata
        self._opening = asyncio.get_running_loop().call_later(within_s, self._open)

    def _open(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
            self._begin(self._context.send_initial_metadata(self._metadata))

    async def close(self) -> None:
        """The status of the call may follow: gRPC never sends one that comes in the middle of something else."""
        self._open()
        if self._begun is not None:
            await asyncio.wait([self._begun], timeout=self._patience.stall_s)
            if self._begun.done():
                _ = self._begun.cancelled() or self._begun.exception()  # the client is gone: nobody needs to know
            else:
                self._begun.cancel()  # it takes nothing

    def _begin(self, call: Coroutine[Any, Any, None]) -> None:
        # gRPC says by way of another thread that it has written something: longer than the request need wait.
        self._begun = asyncio.ensure_future(call)

    async def _end(self) -> None:
        """What was begun is through. Raises what it raised."""
        self._open()
        if self._begun is not None:
            await asyncio.shield(self._begun)
            self._begun = None

    async def accepted(self, prompt_tokens: int, cached_tokens: int, system_fingerprint: str = "") -> None:
        """Under way when this returns, but for a client that reads nothing: the request need not wait for it."""
        said = pb.Accepted(
            prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, system_fingerprint=system_fingerprint
        )
        await self._write(begin=True, accepted=said)

    async def tokens(self, choice: int, tokens: list[Token]) -> None:
        if tokens:
            await self._write(tokens=convert.tokens_to_public_pb(tokens, choice))

    async def thought(self, choice: int, thought: Thought, text: str) -> None:
        said = pb.Thought(choice=choice, chunk=thought.chunk, ids=thought.token_ids, text=text)
        await self._write(thought=said)

    async def recovered(self, attempt: int, reason: str) -> None:
        await self._write(recovered=pb.Recovered(attempt=attempt, reason=reason))

    async def finished(self, choice: int, finish: Finish, delivered: int) -> None:
        """The text that was held back for a stop string belongs to the stream: it comes without a token."""
        if finish.tail:
            await self._write(tokens=convert.tail_to_public_pb(finish.tail, delivered, choice))
        reason = convert.finish_reason_to_pb(finish.reason)
        await self._write(finished=pb.Finished(choice=choice, reason=reason, matched_stop=finish.matched))

    async def completed(self, completed: pb.Completed) -> None:
        await self._write(completed=completed)

    async def _write(self, *, begin: bool = False, **event: Any) -> None:
        async with self._turn:  # who waits for its turn is not stalled
            message = pb.GenerateEvent(request_id=self._request_id, seq=self._seq, **event)
            self._seq += 1
            self._patience.begins(self)
            try:
                await self._end()
                if begin:
                    self._begin(self._context.write(message))
                else:
                    await self._context.write(message)
            except aio.InternalError:  # of the write; that the call is over, gRPC tells only the call's own task
                raise Cancelled("the client has left") from None
            finally:
                self._patience.ends(self)
