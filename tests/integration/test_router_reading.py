"""What a router reads at once, over real gRPC: calls that are held in the tokenizer, and who is refused meanwhile."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest
from grpc import aio

from baton.errors import Overloaded
from baton.limits import MAX_READ_AT_ONCE
from baton.rpc.channel import aio_channel
from baton.rpc.status import from_rpc_error
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1.inference_pb2_grpc import InferenceStub
from baton.tokenizer import OracleTokenizer
from router.floor import RouterSettings
from router.server import serve
from tests.integration.access_support import bearer, token_file
from tests.support.waiting import until

LARGE = "x" * 5000


class HeldTokenizer(OracleTokenizer):
    """Long texts wait for `go`."""

    def __init__(self):
        self.go = threading.Event()
        self.begun = 0

    def encode(self, text):
        if len(text) == len(LARGE):
            self.begun += 1
            self.go.wait(30)
        return super().encode(text)


async def nobody():
    return []


@asynccontextmanager
async def alone(**settings):
    """A router without workers: its service, its tokenizer, and the router itself."""
    tokenizer, free = HeldTokenizer(), "127.0.0.1:0"
    told = RouterSettings("test", "oracle", grpc=free, admin=free, metrics=free, **settings)
    router = await serve(told, nobody, tokenizer)
    try:
        async with aio_channel(router.grpc) as channel:
            yield InferenceStub(channel), tokenizer, router
    finally:
        tokenizer.go.set()
        await router.stop(0.0)


async def refused(call):
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    error = from_rpc_error(caught.value)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s > 0
    return str(error)


def refusals(router):
    return router.floor.metrics.registry.get_sample_value("baton_refusals_total", {"reason": "Overloaded"})


async def test_one_too_many_is_refused_at_once_and_the_others_are_answered():
    async with alone() as (stub, tokenizer, router):
        calls = [stub.Tokenize(pb.TokenizeRequest(text=LARGE)) for _ in range(MAX_READ_AT_ONCE + 1)]
        ends = [asyncio.ensure_future(_end(call)) for call in calls]
        await until(lambda: any(end.done() for end in ends), "one is refused")
        await refused(stub.Detokenize(pb.DetokenizeRequest(ids=[104] * 5000)))
        await refused(stub.Generate(pb.GenerateRequest(text=LARGE)).read())
        assert (await stub.Tokenize(pb.TokenizeRequest(text="hi"))).ids == [104, 105]
        assert (await stub.Detokenize(pb.DetokenizeRequest(ids=[104, 105]))).text == "hi"
        assert refusals(router) == 3
        assert router.floor.outcomes["refused"] == 1
        tokenizer.go.set()
        found = await asyncio.gather(*ends)
        assert sorted(found) == [0] + [len(LARGE)] * MAX_READ_AT_ONCE
        assert len((await stub.Tokenize(pb.TokenizeRequest(text=LARGE))).ids) == len(LARGE)


async def _end(call):
    """The number of tokens, 0 if it was refused."""
    try:
        return len((await call).ids)
    except aio.AioRpcError as error:
        return 0 if isinstance(from_rpc_error(error), Overloaded) else -1


async def test_a_token_has_so_many_texts_at_once_beside_its_requests(tmp_path):
    async with alone(tokens=token_file(tmp_path / "tokens", max_concurrent=1)) as (stub, tokenizer, router):
        alice = {"metadata": bearer("alice")}
        held = asyncio.ensure_future(stub.Generate(pb.GenerateRequest(text=LARGE), **alice).read())
        await until(lambda: tokenizer.begun == 1, "the request is being read")
        text = asyncio.ensure_future(_end(stub.Tokenize(pb.TokenizeRequest(text=LARGE), **alice)))
        await until(lambda: tokenizer.begun == 2, "and a text beside it")
        assert "1 requests of this token" in await refused(stub.Tokenize(pb.TokenizeRequest(text=LARGE), **alice))
        assert (await stub.Detokenize(pb.DetokenizeRequest(ids=[104]), **alice)).text == "h"
        others = asyncio.ensure_future(_end(stub.Tokenize(pb.TokenizeRequest(text=LARGE), metadata=bearer("bob"))))
        await until(lambda: tokenizer.begun == 3, "one of another tenant")
        assert refusals(router) == 1
        tokenizer.go.set()
        assert [await text, await others] == [len(LARGE)] * 2
        held.cancel()
