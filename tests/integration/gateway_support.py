"""A gateway alone, in front of an `Inference` that says what a test wants."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from grpc import aio
from openai import AsyncOpenAI

from baton.constraint import Constraint
from baton.errors import BatonError, InvalidRequest
from baton.grammar import Grammars
from baton.rpc.channel import aio_server, bind
from baton.rpc.status import abort
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from baton.tokenizer import ORACLE_EOS
from router.gateway.app import GatewaySettings
from router.gateway.respond import Patience
from router.gateway.server import HttpServer

Script = Callable[[pb.GenerateRequest], AsyncIterator[dict[str, Any] | BatonError]]
VOCABULARY = {1: " dog", 2: "cat", 3: "\ufffd", 4: "é"}
LENGTH, EOS = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_EOS


def tokens(choice: int, start: int, ids: list[int], text: str, logprobs=()) -> dict[str, Any]:
    return {"tokens": pb.Tokens(choice=choice, ids=ids, text=text, logprobs=logprobs, **{"from": start})}


def finished(choice: int = 0, reason: Any = LENGTH) -> dict[str, Any]:
    return {"finished": pb.Finished(choice=choice, reason=reason)}


def completed(prompt: int = 3, new: int = 2, cached: int = 0) -> dict[str, Any]:
    usage = pb.Usage(prompt_tokens=prompt, completion_tokens=new, cached_tokens=cached)
    return {"completed": pb.Completed(usage=usage)}


async def two_words(request: pb.GenerateRequest) -> AsyncIterator[dict[str, Any] | BatonError]:
    """As many choices as asked for, their tokens in turns; with logprobs if they are asked for."""
    k = request.logprobs if request.HasField("logprobs") else None
    top = [common_pb2.TopLogprob(token_id=i + 1, logprob=-0.5 - i) for i in range(k or 0)]
    entry = [] if k is None else [common_pb2.TokenLogprobs(logprob=-0.5, top=top)]
    yield {"accepted": pb.Accepted(prompt_tokens=3)}
    for at, (token_id, text) in enumerate(((1, "dog"), (2, " cat"))):
        for choice in range(request.n or 1):
            yield tokens(choice, at, [token_id], text, entry)
    for choice in range(request.n or 1):
        yield finished(choice, EOS)
    yield completed(new=2 * (request.n or 1))


def any_text(grammars: Grammars, schema: str, rng: random.Random) -> str:
    """Some text that this JSON schema allows, drawn like a model that has no preference draws it."""
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


class FakeInference(InferenceServicer):
    """Records what it is asked, and does what its script says; an error in the script ends the call."""

    def __init__(self) -> None:
        self.tool_form = ""
        self.script: Script = two_words
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.decoded: list[list[int]] = []
        self.running = 0

    async def Generate(self, request, context) -> None:  # type: ignore[override]
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.running += 1
        try:
            await self._play(request, context)
        finally:
            self.running -= 1

    async def _play(self, request: pb.GenerateRequest, context: aio.ServicerContext) -> None:
        seq = 0
        await context.send_initial_metadata((("baton-request-id", "r-1"),))
        async for step in self.script(request):
            if isinstance(step, BatonError):
                await abort(context, step, "r-1")
            await context.write(pb.GenerateEvent(request_id="r-1", seq=seq, **step))
            seq += 1

    async def Cancel(self, request, context):
        raise NotImplementedError

    async def Resume(self, request, context):  # type: ignore[override]
        raise NotImplementedError

    async def Tokenize(self, request, context):
        raise NotImplementedError

    async def Detokenize(self, request, context):
        self.decoded.append(list(request.ids))
        if not VOCABULARY.keys() >= set(request.ids):
            await abort(context, InvalidRequest.of("ids", "outside the vocabulary"))
        return pb.DetokenizeReply(text="".join(VOCABULARY[i] for i in request.ids).removeprefix(" "))

    async def ListModels(self, request, context):
        self.metadata.append(dict(context.invocation_metadata()))
        return pb.ListModelsReply(models=[self._model()])

    def _model(self) -> pb.Model:
        return pb.Model(id="org/tiny", max_model_len=64, vocab_size=5, tool_form=self.tool_form)


class Alone:
    """The gateway, its router, and a client."""

    def __init__(self, fake: FakeInference, http: HttpServer, client: AsyncOpenAI) -> None:
        self.fake, self.http, self.client = fake, http, client
        self.address = http.address

    async def raw(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], bytes]:
        return await raw(self.address, method, path, body, **headers)


@asynccontextmanager
async def alone(patience: Patience | None = None, target: str = "", **settings: Any) -> AsyncIterator[Alone]:
    fake, server = FakeInference(), aio_server()
    add_InferenceServicer_to_server(fake, server)
    bound = bind(server, "127.0.0.1:0")
    await server.start()
    http = HttpServer("127.0.0.1:0", GatewaySettings("1.2", patience=patience or Patience(), **settings))
    await http.start(target or bound)
    try:
        async with AsyncOpenAI(base_url=f"http://{http.address}/v1", api_key="k", max_retries=0) as client:
            yield Alone(fake, http, client)
    finally:
        await http.stop(0)
        await server.stop(0)


async def raw(
    address: str, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (lower case) and body of one request, as they came over the wire."""
    given = {"host": "x", "connection": "close", "content-length": str(len(body)), "content-type": "application/json"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    reader, writer = await asyncio.open_connection(*address.split(":"))
    try:
        lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        writer.write(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body)
        answer = await reader.read()
    finally:
        writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    first, *fields = head.decode().split("\r\n")
    pairs = [field.split(": ", 1) for field in fields]
    return int(first.split()[1]), {name.lower(): value for name, value in pairs}, rest
