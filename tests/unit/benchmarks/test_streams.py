"""The load generators count complete streams and raise an error for any other."""

import asyncio

import grpc
import pytest

from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from benchmarks.lib.http2 import LoadFailed
from benchmarks.lib.streams import drive
from tests.support.clients import Scripted, serving
from tests.support.time_factor import scaled


def token_event(number, seq=0, text="x"):
    return pb.GenerateEvent(seq=seq, tokens=pb.Tokens(ids=[number], text=text, **{"from": number}))


class Server(Scripted):
    """Answers with one event per token, changed by `twist`, and then an error of `status`, if any."""

    def __init__(self, twist=lambda events: events, status=None, text="x"):
        super().__init__()
        self.twist, self.status, self.text = twist, status, text

    async def Generate(self, request, context):
        self.requests.append(request)
        events = [pb.GenerateEvent(accepted=pb.Accepted(prompt_tokens=1))]
        events += [token_event(i, text=self.text) for i in range(request.sampling.max_tokens)]
        events += [pb.GenerateEvent(finished=pb.Finished()), pb.GenerateEvent(completed=pb.Completed())]
        for seq, event in enumerate(events):
            event.seq = seq
        for event in self.twist(events):
            yield event
        if self.status is not None:
            await context.abort(self.status, "no, \x01 no")


PROMPT, SAMPLING = common_pb2.TokenIds(ids=range(4)), common_pb2.Sampling(max_tokens=8)


async def load(server, *, prompt=PROMPT, streams=3, connections=2, seconds=0.0):
    request = pb.GenerateRequest(token_ids=prompt, sampling=SAMPLING).SerializeToString()
    options = {"answer": SAMPLING.max_tokens, "streams": streams, "connections": connections, "seconds": seconds}
    async with serving(server):
        return await asyncio.to_thread(drive, server.address, lambda: request, **options)


async def test_whole_streams_are_counted_and_followed_by_others_while_time_is_left():
    server = Server()
    passed = await load(server, streams=5, seconds=scaled(0.5))
    assert passed.requests == len(server.requests) > 5
    assert passed.tokens == passed.events == 8 * passed.requests
    assert passed.seconds >= 0.5
    assert passed.cpu_s > 0
    assert all(asked.token_ids == PROMPT for asked in server.requests)


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
