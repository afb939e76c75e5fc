"""Limits on concurrent reading, over real gRPC: calls that are held in the tokenizer, and rejected calls."""

import asyncio
import threading

import pytest
from grpc import aio

from baton.errors import Overloaded
from baton.limits import MAX_READ_AT_ONCE
from baton.rpc.status import from_rpc_error
from baton.rpc.v1 import inference_pb2 as pb
from baton.tokenizer import OracleTokenizer
from tests.integration.access_support import bearer, token_file
from tests.support.waiting import until

LARGE = "x" * 5000
HELD = pb.TokenizeRequest(text=LARGE)


class HeldTokenizer(OracleTokenizer):
    """Makes long texts wait for `go`."""

    def __init__(self):
        self.go = threading.Event()
        self.begun = 0

    def encode(self, text):
        if len(text) == len(LARGE):
            self.begun += 1
            self.go.wait(30)
        return super().encode(text)


@pytest.fixture
def tokenizer(monkeypatch):
    """The tokenizer of the test's router."""
    made = HeldTokenizer()
    monkeypatch.setattr("tests.support.in_process_router.OracleTokenizer", lambda: made)
    yield made
    made.go.set()


async def refused(call):
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    error = from_rpc_error(caught.value)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s > 0
    return str(error)


def refusals(cluster):
    read = cluster.router.context.sinks.metrics.registry.get_sample_value
    return read("baton_refusals_total", {"reason": "Overloaded"})


async def test_one_too_many_is_refused_at_once_and_the_others_are_answered(tokenizer, cluster):
    stub = cluster.stub
    ends = [asyncio.ensure_future(_end(stub.Tokenize(HELD))) for _ in range(MAX_READ_AT_ONCE + 1)]
    await until(lambda: any(end.done() for end in ends), "one is refused")
    await refused(stub.Detokenize(pb.DetokenizeRequest(ids=[104] * 5000)))
    await refused(stub.Generate(pb.GenerateRequest(text=LARGE)).read())
    assert (await stub.Tokenize(pb.TokenizeRequest(text="hi"))).ids == [104, 105]
    assert (await stub.Detokenize(pb.DetokenizeRequest(ids=[104, 105]))).text == "hi"
    assert (refusals(cluster), cluster.router.context.sinks.outcomes["refused"]) == (3, 1)
    tokenizer.go.set()
    assert sorted(await asyncio.gather(*ends)) == [0] + [len(LARGE)] * MAX_READ_AT_ONCE
    assert await _end(stub.Tokenize(HELD)) == len(LARGE)


async def _end(call):
    """Return the number of tokens, 0 for a rejection, and -1 for another error."""
    try:
        return len((await call).ids)
    except aio.AioRpcError as error:
        return 0 if isinstance(from_rpc_error(error), Overloaded) else -1


async def test_a_token_has_so_many_texts_at_once_beside_its_requests(tokenizer, make, tmp_path):
    cluster = await make(tokens=token_file(tmp_path / "tokens", max_concurrent=1))
    stub, alice = cluster.stub, {"metadata": bearer("alice")}
    held = asyncio.ensure_future(stub.Generate(pb.GenerateRequest(text=LARGE), **alice).read())
    await until(lambda: tokenizer.begun == 1, "the request is being read")
    text = asyncio.ensure_future(_end(stub.Tokenize(HELD, **alice)))
    await until(lambda: tokenizer.begun == 2, "and a text beside it")
    assert "at most 1 concurrent requests" in await refused(stub.Tokenize(HELD, **alice))
    assert (await stub.Detokenize(pb.DetokenizeRequest(ids=[104]), **alice)).text == "h"
    others = asyncio.ensure_future(_end(stub.Tokenize(HELD, metadata=bearer("bob"))))
    await until(lambda: tokenizer.begun == 3, "one of another tenant")
    assert refusals(cluster) == 1
    tokenizer.go.set()
    assert [await text, await others] == [len(LARGE)] * 2
    held.cancel()
