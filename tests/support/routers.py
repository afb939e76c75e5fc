"""Requests to a router with scripted workers, the expected answers, and readers of its events."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from grpc import aio

from baton.errors import BatonError, Cancelled
from baton.rpc.status import from_rpc_error
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from router.workers.stream import WorkerStream

PROMPT = [1, 2, 3]


def expected(prompt: list[int], index: int) -> int:
    return (sum(prompt) + 7 * index) % 251


def right(prompt: list[int], length: int = 8) -> list[int]:
    """Return the ids of the expected answer."""
    return [expected(prompt, index) for index in range(length)]


def thought(chunk: int) -> tuple[int, ...]:
    """Token ids of a thought, each fourth one empty; their text begins with a space."""
    return () if chunk % 4 == 1 else tuple(f" z{chunk}".encode())


def asked(
    prompt: list[int] | None = None, max_tokens: int = 8, *, sampling: dict[str, Any] | None = None, **fields: Any
) -> pb.GenerateRequest:
    drawn = common_pb2.Sampling(max_tokens=max_tokens, **(sampling or {}))
    return pb.GenerateRequest(token_ids=common_pb2.TokenIds(ids=prompt or PROMPT), sampling=drawn, **fields)


def ids_of(events: list[pb.GenerateEvent], begin: int = 0, choice: int = 0) -> list[int]:
    """Return the token ids after the first `begin`. Checks that no index is missing or repeated."""
    ids: list[int] = []
    for item in events:
        if item.HasField("tokens") and item.tokens.choice == choice:
            assert getattr(item.tokens, "from") == begin + len(ids)
            ids += item.tokens.ids
    return ids


def kinds(events: list[pb.GenerateEvent]) -> list[str]:
    assert [item.seq for item in events] == list(range(len(events)))
    assert len({item.request_id for item in events}) == 1
    return [item.WhichOneof("event") or "" for item in events]


def recovered(events: list[pb.GenerateEvent]) -> list[tuple[int, str]]:
    found = [item.recovered for item in events if item.HasField("recovered")]
    return [(item.attempt, item.reason) for item in found]


@contextmanager
def refused(kind: type[BatonError], match: str | None = None) -> Iterator[None]:
    """Expect a gRPC call in the block to fail with this error of ours."""
    with pytest.raises(aio.AioRpcError) as caught:
        yield
    with pytest.raises(kind, match=match):
        raise from_rpc_error(caught.value)


async def leave(cluster: Any, call, how: str) -> None:
    """End a call as its client: hang up, or cancel it with another call ("Cancel")."""
    if how == "leave":
        call.cancel()
        return
    request_id = dict(await call.initial_metadata())["baton-request-id"]
    assert (await cluster.stub.Cancel(pb.CancelRequest(request_id=request_id))).found
    with pytest.raises(Cancelled, match="Cancel call"):
        await cluster.answer(call)


def spied(cluster: Any) -> list[str]:
    """Record the commands that the router gives to its links. A stopping link may drop commands before sending them."""
    given: list[str] = []

    def note(link: WorkerStream, send: Callable[..., None], **command: Any) -> None:
        given.extend(f"{link.info.ref.worker_id} {kind}" for kind in command)
        send(**command)

    for link in cluster.links:
        link.send = partial(note, link, link.send)
    return given
