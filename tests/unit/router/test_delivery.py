import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core import Token
from baton.errors import EngineFault
from router.delivery import Delivery


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


@pytest.mark.parametrize(
    ("before", "index"),
    [([token(0)], 0), ([token(1), token(0)], 0), ([token(1)], 1)],
    ids=["delivered", "late", "early"],
)
def test_a_token_that_contradicts_one_that_came_before(before, index):
    delivery = Delivery()
    delivery.take(before)
    with pytest.raises(EngineFault, match=f"token {index}: {100 + index} and 7"):
        delivery.take([token(index, 7)])


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
