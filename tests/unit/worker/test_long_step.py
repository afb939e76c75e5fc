"""A step that takes longer than a lease is progress all the same, layer by layer: its worker keeps the lease."""

import threading
from functools import partial

import pytest

from baton.engine.oracle import OracleBackend, oracle_layout
from baton.worker.loop import EngineLoop
from tests.support.sessions import BLOCK, prefill, reserve
from tests.support.time_factor import scaled
from tests.support.workers import DecodeSide, PrefillSide


class SlowBackend(OracleBackend):
    """Stops in the middle of a forward until it is told to go on."""

    def __init__(self):
        super().__init__(oracle_layout(block_size=BLOCK), max_model_len=64)
        self.inside, self.go_on = threading.Event(), threading.Event()

    def forward(self, batch, kv):
        if batch.on_layer is not None:
            batch.on_layer(0)
        self.inside.set()
        assert self.go_on.wait(scaled(10))
        return super().forward(batch, kv)


@pytest.mark.parametrize(
    ("make", "commands"), [(PrefillSide, [prefill()]), (DecodeSide, [reserve(), prefill(to=None)])]
)
def test_each_layer_counts_as_progress(router, make, commands):
    backend = SlowBackend()
    side = make(backend=backend, loop=partial(EngineLoop, idle_s=60.0))
    for command in commands:
        side.loop.submit(partial(side.role.command, router, command))
    side.loop.start(side.role)
    try:
        assert backend.inside.wait(scaled(10))
        assert side.loop.iterations > 0, "the step has not ended, but its first layer has"
    finally:
        backend.go_on.set()
        side.loop.stop()
    assert side.loop.failure is None
