"""A scripted server for commands, and commands as a user runs them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from typer.testing import CliRunner

from baton import core, errors
from baton.cli.app import app
from baton.rpc import convert
from baton.rpc.status import abort
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import inference_pb2 as inference
from tests.support.clients import Event, Scripted, soon


class Talking(Scripted):
    """Answers with the number of messages and the last one. "hang" never ends; "fail" fails."""

    def __init__(self) -> None:
        super().__init__()
        self.hanging = asyncio.Event()
        self.running = self.most = 0
        self.failing = False
        self.together, self.met = 0, asyncio.Event()  # requests wait until so many have arrived

    async def _events(self, request: inference.GenerateRequest, context: Any) -> AsyncIterator[Event]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.running >= self.together:
                self.met.set()
            await soon(self.met.wait())
            async for event in self._talk(request, context):
                yield event
        finally:
            self.running -= 1

    async def _talk(self, request: inference.GenerateRequest, context: Any) -> AsyncIterator[Event]:
        said = request.chat.messages[-1].content if request.chat.messages else request.text
        if self.failing or said == "fail":
            await abort(context, errors.Overloaded("full", retry_after_s=0.01))
        choices = range(max(1, request.n))
        pieces = [f"{len(request.chat.messages)}:", said, "!"]
        for index, piece in enumerate(pieces):
            for choice in choices:
                yield Event(tokens=convert.tokens_to_public_pb([core.Token(index, 11 + index, piece)], choice))
                if said == "hang":
                    self.hanging.set()
                    await asyncio.Event().wait()
        for choice in choices:
            yield Event(finished=inference.Finished(choice=choice, reason=common.FINISH_REASON_EOS))
        made = len(pieces) * len(choices)
        usage = inference.Usage(prompt_tokens=len(request.token_ids.ids), completion_tokens=made)
        yield Event(completed=inference.Completed(usage=usage))


async def run(*args: object, text: str | bytes = "") -> Any:
    """Run `baton ARGS` in this process, with `text` on standard input."""
    return await asyncio.to_thread(CliRunner().invoke, app, [str(arg) for arg in args], input=text)
