"""`baton drain --here`: the grace of the order, and the wait for the end."""

from unittest.mock import Mock

import pytest

from baton.cli.cluster import operator
from baton.config import ClusterConfig
from baton.core import Role
from baton.errors import DeadlineExceeded
from baton.worker import lifecycle


class FakeLedger:
    """A ledger whose workers leave after `looks` reads. `orders` is the control state."""

    def __init__(self, looks):
        self.looks, self.orders, self.connection = looks, {}, self
        refs = [Mock(worker_id=name, incarnation="1") for name in ("here", "there")]
        self.infos = [Mock(ref=ref, host=ref.worker_id, pid=2**22 + 1, role=Role.DECODE) for ref in refs]

    async def workers(self):
        self.looks -= 1
        return self.infos if self.looks >= 0 else self.infos[1:]

    async def put_order(self, worker_id, order):
        self.orders[worker_id] = order

    async def close(self):
        pass


async def drained(monkeypatch, ledger, wait_s):
    async def connect(*_):
        return ledger

    monkeypatch.setattr("baton.cli.cluster.operator.Ledger.connect", connect)
    monkeypatch.setattr(operator, "ControlState", lambda connection: connection)
    config = ClusterConfig.model_validate({"name": "n", "scaling": {"drain_s": 60}})
    return await operator._drain_host(config, "here", wait_s)


@pytest.mark.parametrize(("wait_s", "grace_s"), [(0.0, 60.0), (45.0, 30.0), (300.0, 60.0), (9.0, 0.0)])
async def test_the_grace_leaves_time_to_move_what_is_left(monkeypatch, wait_s, grace_s):
    ledger = FakeLedger(looks=1)
    assert await drained(monkeypatch, ledger, wait_s) == ["here"]
    assert [(name, order.grace_s) for name, order in ledger.orders.items()] == [("here", grace_s)]


def test_sequences_have_as_long_to_move_as_in_a_worker():
    assert operator.MOVE_S == lifecycle.MOVE_S


async def test_it_waits_for_the_end_of_processes_that_have_left(monkeypatch):
    ledger, alive = FakeLedger(looks=1), [True, True, False]
    monkeypatch.setattr(operator, "LOOK_S", 0.0)
    monkeypatch.setattr("baton.cli.cluster.operator.psutil.pid_exists", lambda pid: alive.pop(0))
    await drained(monkeypatch, ledger, 45.0)
    assert alive == []


async def test_a_worker_that_does_not_leave_is_named(monkeypatch):
    monkeypatch.setattr(operator, "LOOK_S", 0.0)
    with pytest.raises(DeadlineExceeded, match=r"not done in 0\.01 s"):
        await drained(monkeypatch, FakeLedger(looks=10**9), 0.01)
