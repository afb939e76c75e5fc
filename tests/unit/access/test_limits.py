"""How many requests of a token run at once."""

from dataclasses import dataclass
from typing import Any

import pytest

from baton.errors import BatonError, Cancelled, Overloaded
from router.access.limits import Concurrency
from router.access.tokens import Grant, Limits, Right


@dataclass(eq=False)
class Call:
    """What is read of a `router.call.Call`."""

    grant: Grant | None
    reason: BatonError | None = None


def call(key: str = "a") -> Any:
    return Call(Grant("tenant", Right.USER, Limits(max_concurrent=1), key))


def test_each_token_has_its_own_places_and_they_come_back():
    counted = Concurrency()
    for _ in range(2):
        with counted.one_more(call("a")), counted.one_more(call("b")):
            with pytest.raises(Overloaded, match="1 requests of this token"):
                counted.one_more(call("a")).__enter__()
            nobody: Any = Call(None)
            with counted.one_more(nobody):
                pass
    assert counted._running == {}


def test_one_that_is_ending_for_another_leaves_its_place_at_once():
    counted, older, newer = Concurrency(), call(), call()
    with counted.one_more(older):
        older.reason = Cancelled("another call has taken over")
        with counted.one_more(newer), pytest.raises(Overloaded):
            counted.one_more(call()).__enter__()
    assert counted._running == {}
