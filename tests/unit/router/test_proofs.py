"""The delivery of a choice that is computed again for its receipt."""

import pytest

from baton.core import Token
from baton.errors import EngineFault
from router.request.proofs import RepeatedDelivery


def tokens(*ids):
    return [Token(index, each, "") for index, each in enumerate(ids)]


def test_only_the_rest_is_due_and_all_tokens_are_kept():
    delivery = RepeatedDelivery((7, 8))
    assert delivery.ids == []
    assert delivery.merge(tokens(7)) == []
    assert delivery.merge(tokens(7, 8, 9)[1:]) == tokens(7, 8, 9)[2:]
    delivery.complete()
    assert delivery.ids == [7, 8, 9]


def test_other_or_fewer_tokens_than_the_client_has_are_a_fault():
    with pytest.raises(EngineFault, match="token 1 of the answer, computed again, is 9, but the client has 8"):
        RepeatedDelivery((7, 8)).merge(tokens(7, 9))
    delivery = RepeatedDelivery((7, 8))
    delivery.merge(tokens(7))
    with pytest.raises(EngineFault, match="computed again, has 1 tokens, but the client has 2"):
        delivery.complete()
