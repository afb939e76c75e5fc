import asyncio
import random
from typing import Any, cast

import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st

from baton.core import Token
from baton.errors import Cancelled, EngineFault
from router.delivery import Delivery, EventStream, Patience
from tests.simulation.clock import VirtualLoop


def token(index: int, token_id: int | None = None) -> Token:
    return Token(index, 100 + index if token_id is None else token_id, f"<{index}>")


@given(st.integers(1, 12), st.integers(0, 2**32), st.integers(0, 12))
def test_any_order_and_any_number_of_witnesses_give_each_index_once(count, seed, repeats):
    rng = random.Random(seed)
    said = [token(i) for i in range(count)] + [token(rng.randrange(count)) for _ in range(repeats)]
    rng.shuffle(said)
    delivery, heard = Delivery(), []
    while said:
        batch, said = said[: (size := rng.randint(1, 4))], said[size:]
        heard += delivery.take(batch)
        assert [t.index for t in heard] == list(range(len(heard)))
    assert delivery.ids == [100 + i for i in range(count)]
    delivery.complete()


def test_later_tokens_wait_for_earlier_ones():
    delivery = Delivery()
    assert delivery.take([token(2), token(1)]) == []
    assert [t.index for t in delivery.take([token(0)])] == [0, 1, 2]


@pytest.mark.parametrize("before", [[token(0)], [token(1), token(0)]])
def test_a_token_that_contradicts_a_delivered_one(before):
    delivery = Delivery()
    delivery.take(before)
    with pytest.raises(EngineFault, match="token 0: 100 and 7"):
        delivery.take([token(0, 7)])


def test_a_token_that_contradicts_one_that_is_held_back():
    delivery = Delivery()
    delivery.take([token(1)])
    with pytest.raises(EngineFault, match="token 1"):
        delivery.take([token(1, 7)])


def test_an_end_before_an_earlier_token_came():
    delivery = Delivery()
    delivery.take([token(0), token(2)])
    with pytest.raises(EngineFault, match="token 1 never came, token 2 did"):
        delivery.complete()


def test_a_new_attempt_starts_from_what_was_delivered():
    delivery = Delivery()
    delivery.take([token(0), token(2, 5)])
    delivery.forget_early()
    assert [t.token_id for t in delivery.take([token(0), token(1), token(2, 6)])] == [101, 6]


class Reader:
    """A client that takes a message each `pace_s`; and its context."""

    def __init__(self, pace_s):
        self.pace_s = pace_s
        self.took = []

    async def write(self, message):
        await asyncio.sleep(self.pace_s)
        self.took.append((message.seq, message.tokens.choice))


def stream_to(reader, given_up):
    """A stream of which nobody may take a message for more than a second."""
    return EventStream(cast(Any, reader), "r", Patience(1.0), given_up.append)


@pytest.fixture
def in_virtual_time():
    loop = VirtualLoop()
    yield loop.run_until_complete
    loop.close()


def test_choices_that_wait_for_each_other_are_not_stalled(in_virtual_time):
    """Each message is taken in time, the last of them later than a message may take."""
    reader = Reader(0.6)

    async def all_choices():
        given_up: list[Any] = []
        stream = stream_to(reader, given_up)
        await asyncio.gather(*(stream.tokens(choice, [Token(0, 5, "a")]) for choice in range(4)))
        assert not given_up

    in_virtual_time(all_choices())
    assert reader.took == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_a_client_that_takes_nothing_is_given_up(in_virtual_time):
    async def one():
        given_up: list[Any] = []
        await stream_to(Reader(1.1), given_up).tokens(0, [Token(0, 5, "a")])
        (error,) = given_up
        assert isinstance(error, Cancelled)
        assert str(error) == "the client did not read for 1 s"

    in_virtual_time(one())


def test_a_write_that_fails_is_a_client_that_left(in_virtual_time):
    """Found by a choice that writes in a task of its own: gRPC cancels only that of the call."""

    class Gone:
        async def write(self, message):
            raise aio.InternalError("execute_batch")

    async def one():
        with pytest.raises(Cancelled, match="the client has left"):
            await stream_to(Gone(), []).tokens(0, [Token(0, 5, "a")])

    in_virtual_time(one())
