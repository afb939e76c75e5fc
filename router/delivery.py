"""What a client has been sent: tokens merged by index, and numbered events on its stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from grpc import aio

from baton.core import Finish, Token
from baton.errors import Cancelled, EngineFault
from baton.rpc import convert
from baton.rpc.v1 import inference_pb2 as pb

Context = aio.ServicerContext[Any, Any]


class Delivery:
    """Merges tokens of any number of witnesses by index. `ids` are those delivered, and grow only at the end. Pure.

    Token 0 has two witnesses: the prefill worker says it first, the decode worker's first message repeats it. Every
    later attempt repeats one token in the same way. Whatever order that arrives in, a client sees each index once and
    in order, and what it has seen never changes.
    """

    def __init__(self, received: Iterable[int] = ()) -> None:
        self.ids: list[int] = list(received)  # a client that resumes has these
        self._early: dict[int, Token] = {}  # later indices, held back until the earlier ones are there

    def take(self, tokens: Iterable[Token]) -> list[Token]:
        """Those that the client gets now, in order. Raises EngineFault when two witnesses contradict each other."""
        for token in tokens:
            self._hear(token)
        ready: list[Token] = []
        while len(self.ids) in self._early:
            ready.append(self._early.pop(len(self.ids)))
            self.ids.append(ready[-1].token_id)
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

    def forget_early(self) -> None:
        """A new attempt begins: what was held back is computed again."""
        self._early.clear()


class EventStream:
    """Writes one request's numbered events, of all its choices. A client that takes none for `stall_s` is given up.

    What a slow client has not taken waits in the mailboxes of its request, which max_tokens bounds; nobody else waits.
    """

    def __init__(self, context: Context, request_id: str, stall_s: float) -> None:
        self._context = context
        self._request_id = request_id
        self._stall_s = stall_s
        self._seq = 0
        self._turn = asyncio.Lock()  # choices write side by side, a stream takes one message at a time

    async def accepted(self, prompt_tokens: int, cached_tokens: int) -> None:
        await self._write(accepted=pb.Accepted(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens))

    async def tokens(self, choice: int, tokens: list[Token]) -> None:
        if tokens:
            await self._say(choice, convert.tokens_to_public_pb(tokens))

    async def recovered(self, attempt: int, reason: str) -> None:
        await self._write(recovered=pb.Recovered(attempt=attempt, reason=reason))

    async def finished(self, choice: int, finish: Finish, delivered: int) -> None:
        """The text that was held back for a stop string belongs to the stream: it comes without a token."""
        if finish.tail:
            await self._say(choice, convert.tail_to_public_pb(finish.tail, delivered))
        reason = convert.finish_reason_to_pb(finish.reason)
        await self._write(finished=pb.Finished(choice=choice, reason=reason, matched_stop=finish.matched))

    async def completed(self, completed: pb.Completed) -> None:
        await self._write(completed=completed)

    async def _say(self, choice: int, tokens: pb.Tokens) -> None:
        tokens.choice = choice
        await self._write(tokens=tokens)

    async def _write(self, **event: Any) -> None:
        try:
            async with self._turn, asyncio.timeout(self._stall_s):  # who waits for its turn is not stalled
                message = pb.GenerateEvent(request_id=self._request_id, seq=self._seq, **event)
                self._seq += 1
                await self._context.write(message)
        except TimeoutError:
            raise Cancelled(f"the client did not read for {self._stall_s:g} s") from None
        except aio.InternalError:  # of the write; that the call is over, gRPC tells only the call's own task
            raise Cancelled("the client has left") from None
