"""The load generators count complete streams and raise an error for any other."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest

from baton.rpc.channel import aio_server, bind
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from benchmarks.lib import http2
from benchmarks.lib.http2 import LoadFailed
from benchmarks.lib.streams import drive


def token_event(number, text="x", seq=0):
    return pb.GenerateEvent(seq=seq, tokens=pb.Tokens(ids=[number], text=text, **{"from": number}))


class Server:
    """Answers with one event per token, changed by `twist`, and then an error of `status`, if any."""

    def __init__(self, text="x", twist=lambda events: events, status=None):
        self.text, self.twist, self.status = text, twist, status
        self.requests = []

    async def generate(self, request, context):
        self.requests.append(request)
        count = request.sampling.max_tokens
        events = [pb.GenerateEvent(accepted=pb.Accepted(prompt_tokens=1))]
        events += [token_event(i, self.text) for i in range(count)]
        events += [pb.GenerateEvent(finished=pb.Finished()), pb.GenerateEvent(completed=pb.Completed())]
        for seq, event in enumerate(events):
            event.seq = seq
        for event in self.twist(events):
            await context.write(event)
        if self.status is not None:
            await context.abort(self.status, "no, \x01 no")


def request(prompt, answer):
    ids = random.Random(prompt).choices(range(2**31), k=prompt)  # five bytes each
    sampling = common_pb2.Sampling(max_tokens=answer)
    return pb.GenerateRequest(token_ids=common_pb2.TokenIds(ids=ids), sampling=sampling).SerializeToString()


async def load(server, *, prompt=4, answer=8, streams=3, connections=2, seconds=0.0):
    listening = aio_server()
    handler = grpc.unary_stream_rpc_method_handler(
        server.generate, pb.GenerateRequest.FromString, pb.GenerateEvent.SerializeToString
    )
    listening.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("baton.v1.Inference", {"Generate": handler})]
    )
    address = bind(listening, "127.0.0.1:0")
    await listening.start()
    made = request(prompt, answer)
    options = {"answer": answer, "streams": streams, "connections": connections, "seconds": seconds}
    try:
        return await asyncio.to_thread(drive, address, lambda: made, **options)
    finally:
        await listening.stop(None)


async def test_whole_streams_are_counted_and_followed_by_others_while_time_is_left():
    server = Server()
    passed = await load(server, streams=5, seconds=0.2)
    assert passed.requests == len(server.requests) > 5
    assert passed.tokens == passed.events == 8 * passed.requests
    assert passed.seconds >= 0.2
    assert passed.cpu_s > 0
    assert all(len(asked.token_ids.ids) == 4 for asked in server.requests)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("x" * 100_000, {"answer": 3}),  # a frame has at most 16384 bytes
        ("x", {"prompt": 3000, "streams": 30, "connections": 1}),  # 15 KB each, while the first window is 64 KB
    ],
    ids=["answers of many frames", "requests wait for room in the server's window"],
)
async def test_whatever_its_size_all_arrives(text, options):
    server = Server(text)
    passed = await load(server, **options)
    assert passed.requests == len(server.requests) == options.get("streams", 3)
    assert passed.tokens == passed.requests * options.get("answer", 8)


async def test_windows_of_its_own_are_opened_again(monkeypatch):
    monkeypatch.setattr(http2, "_LARGEST_WINDOW", 2**17)
    monkeypatch.setattr(http2, "_RENEW", 2**15)
    passed = await load(Server(text="x" * 10_000), streams=20, connections=1)  # 80 KB each
    assert passed.requests == 20


BROKEN = {
    "unavailable": (Server(status=grpc.StatusCode.UNAVAILABLE), "status 14 and 8 of 8 tokens"),
    "not completed": (Server(twist=lambda events: events[:-1]), "ended with status 0 and 8 of 8 tokens"),
    "half": (Server(twist=lambda events: events[:4]), "ended with status 0 and 3 of 8 tokens"),
    "event missing": (Server(twist=lambda events: events[:3] + events[4:]), "event 4 of stream"),
    "token missing": (Server(twist=lambda events: [*events[:2], token_event(2, seq=2)]), "token 2"),
    "goes on": (Server(twist=lambda events: [*events, pb.GenerateEvent(seq=11)]), "event 11 of stream"),
    "nothing": (Server(twist=lambda events: []), "ended with status 0 and 0 of 8 tokens"),
}


@pytest.mark.parametrize(("server", "text"), BROKEN.values(), ids=BROKEN)
async def test_a_stream_that_is_not_whole_fails_the_load(server, text):
    with pytest.raises(LoadFailed, match=text):
        await load(server)
