"""Which requests meet the SLO."""

from unittest.mock import MagicMock

import pytest

from baton.core import Sampling, SequenceSpec, Token
from baton.testing import FakeClock
from router.request.observer import ChoiceObserver, RequestObserver

SPEC = SequenceSpec((0,), Sampling(max_tokens=9))


def life_of(clock: FakeClock, *, ttft_s: float, itl_s: float, received: int) -> ChoiceObserver:
    sinks = MagicMock(clock=clock, slo_ttft_s=ttft_s, slo_itl_s=itl_s)
    return ChoiceObserver(RequestObserver(sinks, "r"), 0, "r", "r", SPEC, received)


def delivered(clock: FakeClock, life: ChoiceObserver, *waits_s: float) -> None:
    """Deliver one token after each wait. The stage clock sees the first, as an attempt would report it."""
    begin = life.tokens
    for index, wait_s in enumerate(waits_s):
        clock.advance(wait_s)
        if index == 0:
            life.stages.first_token()
        life.delivered([Token(begin + index, 7, "")])


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
    life = life_of(clock, ttft_s=1.0, itl_s=0.25, received=received)
    delivered(clock, life, *waits_s)
    assert life.met_slo() == met
