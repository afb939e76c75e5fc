"""Ranges of a request's numbers that can be checked without the model, and the promise that it asks for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from baton import limits
from baton.errors import Violation
from baton.rpc.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Promise:
    """Upper limits in seconds that an accepted request keeps. `ttft_s` counts from the arrival at the router to the
    first token there. `itl_s` is the mean time between its tokens, as in `slo.itl_ms`. inf promises nothing.
    """

    ttft_s: float = math.inf
    itl_s: float = math.inf

    @property
    def given(self) -> bool:
        return min(self.ttft_s, self.itl_s) < math.inf


NO_PROMISE = Promise()


def wrong_ranges(message: pb.GenerateRequest) -> Iterator[Violation]:
    """Yield the fields that are out of their range. NaN is out of every range."""
    if abs(message.priority) > limits.MAX_PRIORITY:
        text = f"must be between -{limits.MAX_PRIORITY} and {limits.MAX_PRIORITY}, got {message.priority}"
        yield Violation("priority", text)
    if not 0 <= message.resumable_s <= limits.MAX_RESUMABLE_S:
        text = f"must be between 0 and {limits.MAX_RESUMABLE_S} seconds, got {message.resumable_s}"
        yield Violation("resumable_s", text)
    asked = [("ttft_ms", message.ttft_ms)] if message.HasField("ttft_ms") else []
    asked += [("itl_ms", message.itl_ms)] if message.HasField("itl_ms") else []
    for field, value in asked:
        if not 1 <= value <= limits.MAX_PROMISE_MS:
            yield Violation(field, f"must be between 1 and {limits.MAX_PROMISE_MS} milliseconds, got {value:g}")
        if message.n > 1:
            yield Violation(field, f"must be left out with n above 1, got n {message.n}")


def promise_of(message: pb.GenerateRequest) -> Promise:
    """Return the promise that a valid request asks for."""
    limits_s = {"ttft_s": message.ttft_ms / 1000, "itl_s": message.itl_ms / 1000}
    asked = {name: value for name, value in limits_s.items() if value}
    return Promise(**asked) if asked else NO_PROMISE
