"""What is parsed, tokenized or compiled at once: no queue holds it back, and it takes threads that all share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from baton.errors import Overloaded
from baton.limits import MAX_READ_AT_ONCE, MAX_READ_BYTES
from baton.rpc.v1 import inference_pb2 as pb

RETRY_S = 1.0
SMALL_BYTES = 4096  # what is no larger is read without a thread, so that no two of them are at it

Message: TypeAlias = pb.ResumeRequest | pb.TokenizeRequest | pb.DetokenizeRequest


class Reading:
    """Counts what is being read. Small messages without a constraint are always welcome.

    So a token's text, which the gateway asks for in the middle of an answer, is never refused.
    """

    def __init__(self, at_once: int = MAX_READ_AT_ONCE, most_bytes: int = MAX_READ_BYTES) -> None:
        self._at_once, self._most_bytes = at_once, most_bytes
        self._requests = self._bytes = 0

    @contextmanager
    def one_more(self, message: Message) -> Iterator[None]:
        """While `message` is read. Raises Overloaded if it is too much; one alone never is."""
        size = message.ByteSize()
        if not needs_thread(message, size):
            yield
            return
        if self._requests >= self._at_once or (self._requests and self._bytes + size > self._most_bytes):
            raise Overloaded(f"{self._requests} requests are being read, of {self._bytes} bytes", RETRY_S)
        self._requests += 1
        self._bytes += size
        try:
            yield
        finally:
            self._requests -= 1
            self._bytes -= size


def needs_thread(message: Message, size: int) -> bool:
    """Whether reading these `size` bytes may take long."""
    constrained = isinstance(message, pb.ResumeRequest) and message.request.HasField("constraint")
    return constrained or size > SMALL_BYTES
