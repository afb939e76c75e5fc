"""Ideal hit shares of a trace, its slice, and the figures of a replay. No recorded trace is needed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.bench.traces import Arrival, cached_share, read_trace
from baton.planner.sim.cluster import simulate
from baton.planner.sim.scenario import Linear, Pool, Router, Scenario, line
from benchmarks.lib.trace_figures import Replay, figures, ideal, measured, predicted
from benchmarks.lib.trace_run import write_slice, write_synthetic

LOAD = (Arrival(0, 12, 1, (0, 1), 8), Arrival(1, 16, 1, (0, 2), 8), Arrival(2, 12, 1, (0, 1), 8), Arrival(3, 9, 1))


@pytest.mark.parametrize(
    ("most", "hits"),
    [
        (None, 8 + 8),  # of the third prompt too: its last position is always computed
        (2, 8 + 8),  # ends of prompts are forgotten first
        (1, 4 + 4),
        (0, 0),
    ],
)
def test_an_ideal_cache_has_whole_blocks_and_forgets_the_oldest(most: int | None, hits: int):
    assert ideal(LOAD, 4, most) == pytest.approx(hits / 49)


def test_a_slice_keeps_conversations_and_a_synthetic_trace_has_turns(tmp_path: Path):
    source, out = tmp_path / "trace.jsonl", tmp_path / "slice.jsonl"
    write_synthetic(source, 100)
    write_slice(source, out, 2, 30)
    whole, part = read_trace(source).arrivals, read_trace(out).arrivals
    wanted = read_trace(source, every=2, limit=30).arrivals
    assert [replace(one, at_s=0.0) for one in part] == [replace(one, at_s=0.0) for one in wanted]
    assert [one.at_s for one in part] == pytest.approx([one.at_s for one in wanted])
    assert 0.3 < cached_share(whole) < 0.9


def sample(prefill: str, decode: str, cached: int, kv_bytes: int, error: str = "") -> dict[str, Any]:
    told = {"prefill_worker": prefill, "decode_worker": decode, "cached_tokens": cached, "kv_bytes": kv_bytes}
    return {**told, "error": error, "prompt_tokens": 100, "ttft_s": 0.5, "gaps_s": [0.1, 0.2]}


def test_what_was_measured_and_what_was_predicted():
    samples = [sample("p-0", "d-0", 50, 800), sample("d-0", "d-0", 0, 0), sample("p-0", "", 0, 0)]
    report = {"samples": [*samples, sample("", "", 0, 0, "WorkerLost")], "generator": {"cpu_share": 0.1}}
    wanted = Replay(50 / 300, 0.2, (0.5, 0.5, 0.5), (0.1, 0.2), 800, 1, 1, 1, 0.1)
    assert figures(measured(report, token_bytes=10.0)) == pytest.approx(figures(wanted))
    times = {"p50": 0.5, "p90": 0.5, "p99": 0.5}
    pools = {"prefill": {"cached_tokens": 60, "prompt_tokens": 200, "workers": 1}}
    pools["decode"] = {"cached_tokens": 40, "prompt_tokens": 100, "workers": 1}
    counts = {"arrivals": 8, "completed": 8, "local_prefills": 4, "moved_bytes": 3200.0}
    plan = predicted({**pools, **counts, "ttft": times, "itl": times}, 4, 400, 10.0)
    assert (plan.hit, plan.skipped, plan.kv_bytes) == pytest.approx((0.25, 0.2, 1600))
    assert (plan.handoffs, plan.local, plan.errors) == (2, 2, 0), "a plan repeats a short load, here twice"


@pytest.mark.parametrize("blocks", [10_000, 60])
def test_the_simulator_hits_what_an_ideal_cache_hits(tmp_path: Path, blocks: int):
    """Requests follow each other, and a small cache forgets."""
    write_synthetic(tmp_path / "trace.jsonl", 60)
    found = read_trace(tmp_path / "trace.jsonl", scale=32).arrivals
    load = [replace(one, at_s=10.0 * place) for place, one in enumerate(found)]
    pool = Pool(1, Linear(line(0.01, 0.001), line(0.01)), kv_blocks=blocks)
    report = simulate(Scenario(pool, pool, router=Router(local_prefill=False)), load)
    prompts = sum(one.prompt_tokens for one in load)
    assert report.prefill.cached_tokens / prompts == pytest.approx(ideal(load, 16, blocks), rel=0.02)
    assert 0.2 < ideal(load, 16, blocks) < ideal(load, 16) + 1e-9
