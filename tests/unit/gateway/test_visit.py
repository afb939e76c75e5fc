"""The times of a request as a gateway measures them."""

from types import SimpleNamespace

import pytest

from baton.errors import BatonError, NoWorker
from baton.metrics import Metrics
from baton.rpc.v1 import common_pb2
from baton.testing import FakeClock
from router.openai.responses import RequestMetrics


@pytest.fixture
def world():
    made = SimpleNamespace(clock=FakeClock(), metrics=Metrics("here", "1"))
    made.measured = RequestMetrics(made.clock, made.metrics)
    made.value = lambda name, **labels: made.metrics.registry.get_sample_value(f"baton_{name}", labels)
    return made


def test_where_the_time_goes(world):
    for wait, choice, count in ((8, 0, 1), (1, 1, 1), (2, 0, 1), (4, 0, 2), (16, 1, 0)):
        world.clock.advance(wait)
        world.measured.tokens(choice, count)
    world.measured.completed(common_pb2.Timings(queue_s=1, prefill_s=2, e2e_s=20))
    world.measured.completed(common_pb2.Timings(queue_s=5, prefill_s=6, e2e_s=19))
    world.clock.advance(1)
    world.measured.finished()
    sums = {name: world.value(f"{name}_seconds_sum") for name in ("ttft", "itl", "e2e", "queue", "prefill")}
    assert sums == {"ttft": 8, "itl": 3 + 4, "e2e": 32, "queue": 1, "prefill": 2}
    assert world.value("itl_seconds_count") == 1 + 2


def test_it_ends_once(world):
    def visiting():
        with world.measured:
            world.measured.tokens(0, 1)
            world.measured.failed(NoWorker("gone"))
            world.measured.finished()
            raise NoWorker("again")

    with pytest.raises(BatonError, match="again"):
        visiting()
    counts = {outcome: world.value("requests_total", outcome=outcome) for outcome in ("failed", "refused", "finished")}
    assert counts == {"failed": 1, "refused": 0, "finished": 0}


def test_nobody_counts_without_metrics():
    with RequestMetrics(FakeClock(), None) as measured:
        measured.tokens(0, 1)
        measured.tokens(0, 1)
        measured.finished()
