"""The slice of a trace, and the clusters that replay it, for benchmarks/traces.py."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.bench.traces import MOONCAKE_BLOCK, Trace, read_trace
from benchmarks.lib.cluster import cluster
from benchmarks.lib.disagg_run import Target, bench, bind, closed
from benchmarks.lib.protocol import ROOT, python_path

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = 256  # tokens of a colocated step
ITL_MS = 100.0  # goal of the router and of the plan
COMMON = (
    "model.max_model_len=4096",
    "model.dtype=bfloat16",  # `auto` measures, and sides with different dtypes are not comparable
    "prefill.threads=1",
    "decode.threads=1",
    "router.queue.max_requests=1024",
    "router.queue.max_wait_s=120",
    f"slo.itl_ms={ITL_MS:g}",
    "log.level=warning",
)


@dataclass(frozen=True, slots=True)
class Side:
    """A layout: its settings for `baton up`, and the same for `baton plan --what-if`."""

    name: str
    sets: tuple[str, ...]
    what_if: str


SIDES = (
    Side("1+1", ("prefill.replicas=1", "decode.replicas=1"), "prefill=1,decode=1"),
    Side("1+2", ("prefill.replicas=1", "decode.replicas=2"), "prefill=1,decode=2"),
    Side(
        "colocated",
        ("mode=colocated", "prefill.replicas=1", "decode.replicas=1", f"decode.max_batched_tokens={CHUNK}"),
        f"colocated=2,chunk={CHUNK}",
    ),
)


def write_slice(source: Path, out: Path, every: int, limit: int | None) -> None:
    """Write a slice of a Mooncake trace in its format: at most `limit` requests of each `every`-th conversation."""
    rows = [
        {
            "timestamp": round(one.at_s * 1e3),
            "input_length": one.prompt_tokens,
            "output_length": one.max_tokens,
            "hash_ids": one.blocks,
        }
        for one in read_trace(source, every=every, limit=limit).arrivals
    ]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_synthetic(out: Path, requests: int, seed: int = 0) -> None:
    """Write a trace in Mooncake's format: a fifth as many conversations, whose turns repeat the earlier ones."""
    draw, fresh, at = random.Random(seed), 1, 0
    conversations: list[list[int]] = [[0] for _ in range(max(1, requests // 5))]
    rows = []
    for _ in range(requests):
        at += round(draw.expovariate(1 / 1000))
        blocks = draw.choice(conversations)
        blocks += range(fresh, fresh + draw.randrange(1, 6))
        fresh = max(fresh, blocks[-1] + 1)
        length = len(blocks) * MOONCAKE_BLOCK - draw.randrange(1, MOONCAKE_BLOCK)
        row = {"timestamp": at, "input_length": length, "output_length": draw.randrange(100, 600)}
        rows.append(json.dumps({**row, "hash_ids": blocks}) + "\n")
    out.write_text("".join(rows))


@dataclass(frozen=True, slots=True)
class Replayer:
    """Replays one slice at `rate` requests/s. `scale` divides its lengths."""

    slice: Path
    scale: float
    rate: float
    sets: tuple[str, ...]  # of all sides, such as the model

    def trace(self) -> Trace:
        """Return the slice as the load generator reads it."""
        return read_trace(self.slice, scale=self.scale)

    @contextlib.contextmanager
    def running(self, side: Side) -> Iterator[Target]:
        """Run a side's cluster, each worker on one core, and send some requests."""
        with cluster(f"traces-{side.name.replace('+', '-')}", *COMMON, *self.sets, *side.sets) as state:
            bind(state)
            target = Target(("--target", state.grpc), state.admin)
            closed(target, 200, 8, 6, seed=1)
            yield target

    def replay(self, target: Target, seed: int) -> dict[str, Any]:
        """Return the report of `baton bench`. Another `seed` gives other tokens with the same shared prefixes."""
        paced = ["--arrivals", "trace", "--rate", f"{self.rate:g}", "--seed", str(seed), "--max-in-flight", "4096"]
        return bench(target, ["--trace", str(self.slice), "--scale", f"{self.scale:g}", *paced])

    def predict(self, side: Side, profile: Path, seed: int) -> dict[str, Any]:
        """Return the report of `baton plan --what-if` for the same slice."""
        sets = (part for item in ("model.path=oracle", *COMMON, *side.sets) for part in ("--set", item))
        load = ["--trace", str(self.slice), "--scale", f"{self.scale:g}", "--rate", f"{self.rate:g}"]
        load += ["--requests", str(len(self.trace().arrivals)), "--seed", str(seed), "--what-if", side.what_if]
        argv = [sys.executable, "-m", "baton", "plan", "--json", "--profile", str(profile), *load]
        env = {**os.environ, "PYTHONPATH": python_path(ROOT)}
        argv += ["-c", "configs/no-ray.yaml", *sets]
        done = subprocess.run(argv, env=env, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        found: dict[str, Any] = json.loads(done.stdout)["report"]
        return found
