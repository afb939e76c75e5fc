"""Requests to a router with scripted workers, the answers that are right, and what a client reads of one."""

from __future__ import annotations

from typing import Any

from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb

PROMPT = [1, 2, 3]


def expected(prompt: list[int], index: int) -> int:
    return (sum(prompt) + 7 * index) % 251


def right(prompt: list[int], length: int = 8) -> list[int]:
    """The ids of the right answer."""
    return [expected(prompt, index) for index in range(length)]


def thought(chunk: int) -> tuple[int, ...]:
    """Token ids of a thought, each fourth one empty; their text has a space in front."""
    return () if chunk % 4 == 1 else tuple(f" z{chunk}".encode())


def asked(
    prompt: list[int] | None = None, max_tokens: int = 8, *, sampling: dict[str, Any] | None = None, **fields: Any
) -> pb.GenerateRequest:
    drawn = common_pb2.Sampling(max_tokens=max_tokens, **(sampling or {}))
    return pb.GenerateRequest(token_ids=common_pb2.TokenIds(ids=prompt or PROMPT), sampling=drawn, **fields)


def ids_of(events: list[pb.GenerateEvent], begin: int = 0, choice: int = 0) -> list[int]:
    """Token ids after the first `begin`, after checking that no index came twice or was missed."""
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
