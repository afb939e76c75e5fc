"""Messages of a stream within a limit of bytes: gRPC ends a call whose message is larger than its receiver takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from google.protobuf.message import Message

from baton.limits import INTERNAL_RECEIVE_BYTES

M = TypeVar("M", bound=Message)
MESSAGE_BYTES = INTERNAL_RECEIVE_BYTES // 2  # half, because a message has more than its parts


def within(groups: Iterable[list[M]]) -> Iterator[list[M]]:
    """Join the groups, in order, to lists of at most MESSAGE_BYTES; without groups, yield an empty list. A group stays
    together unless it exceeds the limit by itself. Only a single message may exceed it.
    """
    found: list[M] = []
    size = 0
    for part, nbytes in _parts(groups):
        if size and size + nbytes > MESSAGE_BYTES:
            yield found
            found, size = [], 0
        found += part
        size += nbytes
    yield found


def _parts(groups: Iterable[list[M]]) -> Iterator[tuple[list[M], int]]:
    for group in groups:
        sizes = [message.ByteSize() for message in group]
        if sum(sizes) > MESSAGE_BYTES:
            yield from (([message], nbytes) for message, nbytes in zip(group, sizes, strict=True))
        else:
            yield group, sum(sizes)
