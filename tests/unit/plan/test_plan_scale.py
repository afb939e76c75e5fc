"""`baton plan --what-if` with the real simulator: a trace of which no row is lost.

The trace is made here, in the format that Mooncake published its own in: conversations, each turn of which begins with
all blocks of the turn before. The same trace at full scale: docs/simulator.md.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli import plan as command
from baton.cli.app import app
from baton.workload.traces import MOONCAKE_BLOCK
from simulator.profile import load_profile

PROFILE = "opt-66b-a100"
Row = dict[str, Any]


def what_if(what: str, *args: object) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["plan", *map(str, args), "--what-if", what, "--json"])
    assert done.exception is None, done.output
    return json.loads(done.stdout)


def conversations(draw: Random, turns: int) -> list[Row]:
    """Rows of that many turns, some seconds apart, in the order of time."""
    rows: list[Row] = []
    names = itertools.count(1)
    while len(rows) < turns:
        at_ms, length = draw.randrange(0, 150_000), 0
        blocks = [0] * draw.randrange(2)  # some begin with what all know
        for _ in range(min(draw.randint(1, 4), turns - len(rows))):
            length += draw.randint(MOONCAKE_BLOCK, 6 * MOONCAKE_BLOCK)
            wanted = -(-length // MOONCAKE_BLOCK)
            blocks = [*blocks, *itertools.islice(names, wanted - len(blocks))]
            row = {"timestamp": at_ms, "input_length": length, "output_length": draw.randint(1, 300)}
            rows.append(row | {"hash_ids": blocks})
            at_ms += draw.randrange(5_000, 30_000)
    return sorted(rows, key=lambda row: row["timestamp"])


def ended(report: dict[str, Any]) -> int:
    return sum(report[outcome] for outcome in ("completed", "refused", "expired", "failed"))


def test_every_row_of_a_trace_is_accounted_for(monkeypatch, tmp_path: Path, seed):
    monkeypatch.setattr(command, "configure_logging", lambda *_: None)  # it is the process's, and others log here too
    rows = conversations(Random(seed), 400)
    held = load_profile(PROFILE).layout(8).kv_tokens
    long: Row = {"timestamp": 60_000, "input_length": held + 1, "output_length": 5, "hash_ids": []}
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, [*rows, long, long])))
    goals = ("--ttft-ms", 10_000, "--itl-ms", 100)
    asked = ("--profile", PROFILE, "--trace", trace, "--requests", len(rows) + 2, *goals)
    found = what_if("prefill=6,decode=6,tp=8", *asked)
    report = found["report"]
    assert found["rate"] == pytest.approx((len(rows) + 2) / (rows[-1]["timestamp"] - rows[0]["timestamp"]) * 1e3, 0.01)
    assert report["arrivals"] == ended(report) == len(rows) + 2
    assert (report["completed"], report["refused"]) == (len(rows), 2), "no worker could ever hold these two"
    assert report["output_tokens"] == sum(row["output_length"] for row in rows)
    assert not report["recoveries"], "else some of it would be computed twice"
    pools = report["prefill"], report["decode"]
    computed = sum(pool["prompt_tokens"] + pool["cached_tokens"] for pool in pools)
    assert computed == sum(row["input_length"] for row in rows)
    assert sum(pool["cached_tokens"] for pool in pools) > 0.1 * computed, "turns begin as those before them"
    assert report["ttft"]["count"] == report["e2e"]["count"] == len(rows)
    assert report["itl"]["count"] == report["output_tokens"] - len(rows)
    faster = what_if("prefill=6,decode=6,tp=8,fault=death:decode-0@20", *asked, "--rate", found["rate"] * 2)["report"]
    assert faster["arrivals"] == ended(faster) == len(rows) + 2
    assert faster["output_tokens"] == report["output_tokens"], "a worker that dies takes no row with it"
    assert faster["duration_s"] < report["duration_s"]
