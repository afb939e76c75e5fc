"""A gateway without a router, in front of a scripted `Inference`."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI

from baton.core import Constraint
from baton.errors import BatonError, InvalidRequest
from baton.rpc.status import abort
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.structured_output import Grammars
from baton.tokenizer import ORACLE_EOS
from router.openai.server import GatewaySettings, HttpServer
from tests.support.clients import Event, Scripted, serving

Script = Callable[[pb.GenerateRequest], AsyncIterator[dict[str, Any] | BatonError]]
VOCABULARY = {1: " dog", 2: "cat", 3: "\ufffd", 4: "é", 5: "</s>"}
HALF = b"\xe6\x97"
LENGTH, EOS = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_EOS
HELLO = [{"role": "user", "content": "hello"}]
USAGE = {"stream_options": {"include_usage": True}}


def tokens(choice: int, start: int, ids: list[int], text: str, logprobs=()) -> dict[str, Any]:
    rest: dict[str, Any] = {"from": start}
    return {"tokens": pb.Tokens(choice=choice, ids=ids, text=text, logprobs=logprobs, **rest)}


def finished(choice: int = 0, reason: Any = LENGTH) -> dict[str, Any]:
    return {"finished": pb.Finished(choice=choice, reason=reason)}


def completed(prompt: int = 3, new: int = 2, fingerprint: str = "", **usage: Any) -> dict[str, Any]:
    spent = pb.Usage(prompt_tokens=prompt, completion_tokens=new, **usage)
    return {"completed": pb.Completed(usage=spent, system_fingerprint=fingerprint)}


def spoken(text: str, reason: Any = EOS, size: int = 5, choices: int = 1) -> list[dict[str, Any]]:
    """Return the events of an answer with this text, `size` characters at a time."""
    steps = []
    for choice in range(choices):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        steps += [tokens(choice, number, [1], piece) for number, piece in enumerate(pieces)]
        steps.append(finished(choice, reason))
    return [*steps, completed()]


async def two_words(request: pb.GenerateRequest) -> AsyncIterator[dict[str, Any] | BatonError]:
    """Yield as many choices as requested, their tokens in turns, with logprobs if requested."""
    k = request.logprobs if request.HasField("logprobs") else None
    top = [common_pb2.TopLogprob(token_id=i + 1, logprob=-0.5 - i) for i in range(k or 0)]
    entry = [] if k is None else [common_pb2.TokenLogprobs(logprob=-0.5, top=top)]
    yield {"accepted": pb.Accepted(prompt_tokens=3)}
    for at, (token_id, text) in enumerate(((1, "dog"), (2, " cat"))):
        for choice in range(request.n or 1):
            yield tokens(choice, at, [token_id], text, entry)
    for choice in range(request.n or 1):
        yield finished(choice, EOS)
    yield completed(new=2 * (request.n or 1), cached_tokens=1)


def any_text(grammars: Grammars, schema: str, rng: random.Random) -> str:
    """Draw some text that this JSON schema allows, like a model without preferences."""
    guide = grammars.start(Constraint("json_schema", (schema,)))
    assert guide is not None
    allowed, drawn = np.zeros(guide.words, dtype=np.int32), bytearray()
    while not guide.complete:
        guide.fill(allowed)
        bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")
        token = int(rng.choice(np.flatnonzero(bits)))
        if token == ORACLE_EOS:
            break
        guide.advance(token)
        drawn.append(token)
    return drawn.decode()


class FakeInference(Scripted):
    """Records its requests and plays its script. An error in the script ends the call."""

    def __init__(self) -> None:
        super().__init__()
        self.tool_form = self.reasoning_form = ""
        self.script: Script = two_words
        self.decoded: list[list[int]] = []
        self.tokenized: list[pb.TokenizeRequest] = []
        self.older = False  # a release that sends no bytes of tokens
        self.running = self.listed = 0
        self.naming = asyncio.Event()  # models are listed while it is set
        self.naming.set()

    async def _events(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[Event]:
        self.running += 1
        try:
            await context.send_initial_metadata((("baton-request-id", "r1"),))
            async for step in self.script(request):
                if isinstance(step, BatonError):
                    await abort(context, step, "r1")
                yield Event(**step)
        finally:
            self.running -= 1

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeReply:
        self.decoded.append(list(request.ids))
        if request.pieces and not self.older:
            pieces = [HALF if i == 3 else VOCABULARY.get(i, "").encode() for i in request.ids]
            return pb.DetokenizeReply(pieces=[pb.TokenPiece(bytes=each, special=each == b"</s>") for each in pieces])
        if not VOCABULARY.keys() >= set(request.ids):
            await abort(context, InvalidRequest.of("ids", "outside the vocabulary"))
        return pb.DetokenizeReply(text="".join(VOCABULARY[i] for i in request.ids).removeprefix(" "))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeReply:
        self.tokenized.append(request)
        return pb.TokenizeReply(ids=[1, 2, 3])

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsReply:
        self.listed += 1
        await self.naming.wait()
        self.metadata = dict(context.invocation_metadata())
        model = pb.Model(id="org/tiny", max_model_len=64, vocab_size=5, tool_form=self.tool_form)
        model.reasoning_form = self.reasoning_form
        return pb.ListModelsReply(models=[model])


class Asking:
    """Requests to a gateway through the `openai` package, with default options, or as bytes."""

    def __init__(self, address: str, client: Any, **options: Any) -> None:
        self.address, self.client, self.options = address, client, options

    async def complete(self, prompt: Any = "hello", **options: Any) -> Any:
        return await self.client.completions.create(prompt=prompt, **{**self.options, **options})

    async def chat(self, messages: Any = HELLO, **options: Any) -> Any:
        return await self.client.chat.completions.create(messages=messages, **{**self.options, **options})

    async def streamed(self, path: str, *args: Any, **options: Any) -> list[Any]:
        """Return all chunks of the answer to `complete` or `chat`; `path` is the method's name."""
        return [chunk async for chunk in await getattr(self, path)(*args, stream=True, **options)]

    async def raw(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], bytes]:
        return await raw(self.address, method, path, body, **headers)


class Alone(Asking):
    """The gateway, its scripted server, and a client."""

    def __init__(self, fake: FakeInference, http: HttpServer, client: AsyncOpenAI) -> None:
        super().__init__(http.address, client, model="org/tiny")
        self.fake, self.http = fake, http

    def plays(self, *steps: dict[str, Any] | BatonError) -> None:
        """Answer each later request with these steps."""

        async def script(request: pb.GenerateRequest) -> AsyncIterator[dict[str, Any] | BatonError]:
            for step in steps:
                yield step

        self.fake.script = script


def client_of(address: str) -> AsyncOpenAI:
    """Return a client that loads no CA certificates, because loading them takes longer than most tests."""
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return AsyncOpenAI(base_url=f"http://{address}/v1", api_key="k", max_retries=0, http_client=http)


@asynccontextmanager
async def asking(address: str, **options: Any) -> AsyncIterator[Asking]:
    """Yield a client of a router that serves the oracle."""
    async with client_of(address) as client:
        yield Asking(address, client, model="oracle", **options)


@asynccontextmanager
async def alone(target: str = "", **settings: Any) -> AsyncIterator[Alone]:
    async with serving(FakeInference()) as fake:
        http = HttpServer("127.0.0.1:0", GatewaySettings("1.2", **settings))
        await http.start(target or fake.address)
        try:
            async with client_of(http.address) as client:
                yield Alone(fake, http, client)
        finally:
            await http.stop(0)


async def refused(kind: type[openai.OpenAIError], asked: Awaitable[Any], match: str | None = None) -> Any:
    """Check that this request fails and return the client's error."""
    with pytest.raises(kind, match=match) as caught:
        await asked
    return caught.value


async def opened(
    address: str, method: str, path: str, body: bytes = b"", limit: int = 2**16, **headers: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection and send this request over it."""
    given = {"host": "localhost", "content-length": str(len(body)), "content-type": "application/json"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    reader, writer = await asyncio.open_connection(*address.split(":"), limit=limit)
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    writer.write(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body)
    return reader, writer


async def raw(
    address: str, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers (lower case) and body of one request, as received."""
    closing: dict[str, Any] = {"connection": "close", **headers}
    reader, writer = await opened(address, method, path, body, **closing)
    try:
        answer = await reader.read()
    finally:
        writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    first, *fields = head.decode().split("\r\n")
    pairs = [field.split(": ", 1) for field in fields]
    return int(first.split()[1]), {name.lower(): value for name, value in pairs}, rest
