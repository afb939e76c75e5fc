"""Which requests meet the SLO."""

from unittest.mock import MagicMock

import pytest

from baton.core import Sampling, SequenceSpec, Token
from baton.testing import FakeClock
from router.request.observer import ChoiceObserver, RequestObserver

SPEC = SequenceSpec((0,), Sampling(max_tokens=9))


@pytest.mark.parametrize("received", [0, 3], ids=["new", "resumed"])
@pytest.mark.parametrize(
    ("waits_s", "met"),
    [
        ((), True),  # no token, no wait for one
        ((1.0,), True),
        ((1.5,), False),
        ((1.0, 0.25), True),
        ((1.0, 0.5), False),
        ((1.0, 0.375, 0.125), True),  # on average
        ((1.0, 0.125, 0.125, 0.75), False),
    ],
)
def test_the_first_token_is_in_time_and_the_others_are_on_average(waits_s, met, received):
    clock = FakeClock()
    sinks = MagicMock(clock=clock, slo_ttft_s=1.0, slo_itl_s=0.25)
    life = ChoiceObserver(RequestObserver(sinks, "r"), 0, "r", "r", SPEC, received)
    for index, wait_s in enumerate(waits_s, received):
        clock.advance(wait_s)
        if index == received:
            life.stages.first_token()  # as an attempt would report it
        life.delivered([Token(index, 7, "")])
    assert life.met_slo() == met
