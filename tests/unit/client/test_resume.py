"""Whether a broken stream is resumed, and the error if it is not."""

import pytest

from baton import errors
from baton.client._retry import Attempts, Recovery
from baton.errors import BatonError, EngineFault, InvalidRequest, NoWorker, Overloaded, WorkerLost
from baton.testing import FakeClock

LOST = WorkerLost("lost")
ANSWERS = [EngineFault("x"), Overloaded("x"), errors.DeadlineExceeded("x"), errors.Cancelled("x")]
REFUSALS = [errors.Unsupported("x"), errors.UnknownModel("x"), InvalidRequest.of("received", "more than there are")]


def attempts(retries: int = 5) -> Attempts:
    return Attempts(retries, None, FakeClock(), lambda: 1.0)


def recovery(targets: int = 1) -> Recovery:
    made = Recovery(targets)
    made.resumable = True
    return made


def lost(targets: int = 1, retries: int = 5) -> tuple[Recovery, Attempts]:
    """Return the recovery of a lost stream."""
    broken, tries = recovery(targets), attempts(retries)
    broken.wait_after(LOST, tries, answered=True)
    return broken, tries


def raised(broken: Recovery, error: BatonError, tries: Attempts | None = None, *, answered: bool) -> BatonError:
    with pytest.raises(BatonError) as caught:
        broken.wait_after(error, tries or attempts(), answered=answered)
    return caught.value


@pytest.mark.parametrize("loss", [LOST, NoWorker("x")])
def test_a_loss_is_waited_after_if_the_stream_can_be_resumed(loss: BatonError):
    assert recovery().wait_after(loss, attempts(), answered=True) == 0.25
    assert raised(Recovery(1), loss, answered=True) is loss


@pytest.mark.parametrize("error", [*ANSWERS, *REFUSALS])
def test_what_a_stream_with_events_says_is_the_answer(error: BatonError):
    broken = recovery()
    assert raised(broken, error, answered=True) is error
    broken.wait_after(LOST, attempts(), answered=True)
    assert raised(broken, error, answered=True) is error


@pytest.mark.parametrize("refusal", REFUSALS)
def test_each_router_may_refuse_once(refusal: BatonError):
    broken, tries = lost(targets=2)
    assert broken.wait_after(refusal, tries, answered=False) == 0.0
    for _ in range(2):
        given_up = raised(broken, refusal, answered=False)
        assert (given_up, given_up.__cause__) == (LOST, refusal)


def test_after_progress_everything_counts_anew():
    broken, tries = lost(targets=2)
    broken.wait_after(REFUSALS[0], tries, answered=False)
    broken.progressed()
    second = WorkerLost("again")
    broken.wait_after(second, tries, answered=True)
    assert broken.wait_after(REFUSALS[0], tries, answered=False) == 0.0
    assert raised(broken, REFUSALS[0], answered=False) is second


def test_a_resume_that_fails_is_tried_again_as_any_call():
    (broken, tries), last, fault = lost(retries=3), NoWorker("y"), EngineFault("x")
    assert broken.wait_after(Overloaded("full", 2.0), tries, answered=False) == 2.5
    assert broken.wait_after(NoWorker("x"), tries, answered=False) == 1.0
    assert raised(broken, last, tries, answered=False) is last
    assert raised(broken, fault, answered=False) is fault
