"""A step that takes longer than a lease is progress all the same, layer by layer: its worker keeps the lease."""

import threading
from functools import partial
from typing import Any

import pytest

from baton.clock import FakeClock
from baton.core import Role
from baton.engine.oracle import OracleBackend, oracle_layout
from baton.worker.loop import EngineLoop
from decode_workers.role import DecodeRole
from prefill_workers.role import PrefillRole
from tests.unit.worker.pusher import FakePusher, P
from tests.unit.worker.support import (
    BLOCK,
    D,
    FakeSession,
    Records,
    engine_of,
    info_of,
    prefill,
    reserve,
)


class SlowBackend(OracleBackend):
    """Stops in the middle of a forward until it is told to go on."""

    def __init__(self):
        super().__init__(oracle_layout(block_size=BLOCK), max_model_len=64)
        self.inside, self.go_on = threading.Event(), threading.Event()

    def forward(self, batch, kv):
        if batch.on_layer is not None:
            batch.on_layer(0)
        self.inside.set()
        assert self.go_on.wait(10)
        return super().forward(batch, kv)


class Nothing:
    """A listener that keeps no report."""

    def __init__(self, role):
        self.stepped, self.tick = role.stepped, role.tick


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_each_layer_counts_as_progress(role):
    engine = engine_of(role, 40)
    engine.backend = backend = SlowBackend()
    loop, clock, session = EngineLoop(engine, idle_s=60.0), FakeClock(), FakeSession()
    made: Any
    records: Any = Records()
    if role is Role.PREFILL:
        made = PrefillRole(info_of(P, role, engine), engine, loop, clock)
        made.attach(FakePusher(engine, made.push_ended))
        commands = [prefill()]
    else:
        made = DecodeRole(info_of(D, role, engine), engine, loop, records, clock)
        commands = [reserve(), prefill(to=None)]
    for command in commands:
        loop.submit(partial(made.command, session, command))
    loop.start(Nothing(made))
    try:
        assert backend.inside.wait(10)
        assert loop.iterations > 0, "the step has not ended, but its first layer has"
    finally:
        backend.go_on.set()
        loop.stop()
    assert loop.failure is None
