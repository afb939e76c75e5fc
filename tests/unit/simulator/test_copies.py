"""What the simulator has of its own though production has it, too: defaults, and which KV is given up for room.

The states of an attempt and its recovery: tests/simulation/test_simulator_recovers_alike.py.
"""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any, cast

from baton.cli.plan import _pool, _router
from baton.config import load_config
from baton.core import HandoffId
from prefill_workers.work import spare
from router.floor import RouterSettings
from simulator.scenario import Network, Pool, Router, Slo
from simulator.worker_prefill import PrefillWorker


def test_what_is_not_said_is_what_a_cluster_has_of_which_it_is_not_said(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: oracle}\n")
    config = load_config(path, (), {})
    assert _router(config) == Router()
    assert Router().attempts == RouterSettings(name="", model="").attempts
    assert _pool(config.decode) == Pool(0)
    assert (config.slo.ttft_ms / 1e3, config.slo.itl_ms / 1e3) == (Slo().ttft_s, Slo().itl_s)
    assert config.transfer.coalesce_below == Network().coalesce_below


def test_the_same_kv_is_given_up_where_prompts_find_no_room(seed):
    draw = Random(seed)
    for _ in range(200):
        likely = draw.choice((0.5, 0.9))
        works = {
            HandoffId(str(n), 1): (draw.random() < likely, draw.random() < likely) for n in range(draw.randrange(6))
        }
        theirs: Any = {
            name: SimpleNamespace(first=computed or None, waits=waits) for name, (computed, waits) in works.items()
        }
        pushes = {name: SimpleNamespace(computed=computed, waits=waits) for name, (computed, waits) in works.items()}
        spared: Any = PrefillWorker._spare(cast("Any", SimpleNamespace(pushes=pushes)))
        assert spared == spare(theirs), works
