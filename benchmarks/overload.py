"""Behavior under overload: TTFT of accepted requests, rejections, memory.

    python benchmarks/overload.py --quick         under 2 minutes on 2 cores
    python benchmarks/overload.py                 longer phases
    python benchmarks/overload.py --write-docs    the section in docs/measurements/overload.md from it
    python benchmarks/overload.py --burst 2000    so many HTTP requests at the same time, with and without `model`

The real router and workers run as plain processes on the oracle engine, with decode capacity for a few long requests. A
closed loop with enough clients to keep some waiting finds the capacity. Then requests arrive in an open loop (Poisson)
at that rate and at five times that rate. Rejected clients do not retry. The last line of stdout is one JSON object.
`ttft_ratio_*` is five times over one time. `goodput_ratio` is finished requests per second over the capacity.
`rss_growth` is the router's memory at the end of the overload over that after a quarter of it. All processes share the
machine: if rejections alone fill its cores, this measures them instead of the admission.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/overload.py`

import psutil

from baton import AsyncClient
from baton.cluster.state_dir import ClusterState
from baton.errors import BatonError, Overloaded
from benchmarks.lib import burst as bursts
from benchmarks.lib.cluster import cluster
from benchmarks.lib.machine import machine
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.report import fill, markdown

PROMPT, ANSWER = 64, 300  # tokens
NAME = "overload"
SETS = (
    "model.max_model_len=512",
    "decode.kv_memory=384KiB",
    "prefill.kv_memory=256KiB",
    "prefill.prefix_cache=false",
    "decode.prefix_cache=false",
)


@dataclass
class Phase:
    """Results that the clients of one load saw, in seconds."""

    offered: int = 0
    finished: int = 0
    late: int = 0  # accepted into the queue and rejected later
    failed: list[str] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)  # time until the rejection
    delays: list[float] = field(default_factory=list)  # `retry_after_s` of rejections
    rss: list[int] = field(default_factory=list)  # of the router, in bytes
    lasted_s: float = 0.0

    @property
    def per_s(self) -> float:
        return self.finished / self.lasted_s


async def ask(client: AsyncClient, phase: Phase, rng: random.Random) -> None:
    """Send one request and record its result."""
    prompt, began, first = [rng.randrange(256) for _ in range(PROMPT)], time.monotonic(), None
    phase.offered += 1
    try:
        async with client.stream(prompt, max_tokens=ANSWER, temperature=0, ignore_eos=True) as stream:
            async for _ in stream:
                first = first or time.monotonic() - began
    except Overloaded as error:
        phase.refused.append(time.monotonic() - began)
        phase.delays.append(error.retry_after_s)
        phase.late += "waited" in str(error)
    except BatonError as error:
        phase.failed.append(repr(error))
    else:
        phase.finished += 1
        phase.ttft.append(first or 0.0)


async def closed(client: AsyncClient, seconds: float, clients: int, rng: random.Random) -> Phase:
    """Run `clients` clients, each with its next request after the last one ended, or shortly after a rejection."""
    phase, began = Phase(), time.monotonic()

    async def one() -> None:
        while time.monotonic() - began < seconds:
            refused = len(phase.refused)
            await ask(client, phase, rng)
            await asyncio.sleep(0.02 * (len(phase.refused) > refused))

    await asyncio.gather(*(one() for _ in range(clients)))
    phase.lasted_s = time.monotonic() - began
    return phase


async def opened(client: AsyncClient, seconds: float, per_s: float, rng: random.Random, router: int) -> Phase:
    """Send requests at random times, independently of each other."""
    phase, began, due = Phase(), time.monotonic(), 0.0
    watch = asyncio.create_task(_watch(phase, router))
    tasks = []
    while (due := due + rng.expovariate(per_s)) < seconds:
        await asyncio.sleep(max(began + due - time.monotonic(), 0))
        tasks.append(asyncio.create_task(ask(client, phase, rng)))
    await asyncio.gather(*tasks)
    phase.lasted_s = time.monotonic() - began
    watch.cancel()
    return phase


async def _watch(phase: Phase, router: int) -> None:
    process = psutil.Process(router)
    while True:
        phase.rss.append(process.memory_info().rss)
        await asyncio.sleep(0.25)


async def measure(state: ClusterState, args: argparse.Namespace) -> dict[str, Phase]:
    """Run all phases in sequence on one cluster."""
    rng, router = random.Random(args.seed), state.processes["router"].pid
    seconds, phases = args.seconds or (15.0 if args.quick else 60.0), dict[str, Phase]()
    async with AsyncClient(state.grpc, timeout=60.0, max_retries=0) as client:
        await closed(client, 3.0, 24, rng)
        phases["capacity"] = await closed(client, seconds, 24, rng)
        capacity = phases["capacity"].per_s
        for load in (1.0, args.load):
            print(f"{load:g} times {capacity:.1f} requests/s", file=sys.stderr)
            phases[f"{load:g}x"] = await opened(client, seconds, load * capacity, rng, router)
    return phases


def at(values: list[float], share: float) -> float:
    """Return a quantile, or 0 without values."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else 0.0


def ratios(phases: dict[str, Phase]) -> dict[str, float | None]:
    """Return the ratios that other programs check. None means not measurable."""
    capacity, one, over = phases.values()
    rest = over.rss[len(over.rss) // 4 :]  # memory that the load needs in any case is allocated by then
    return {
        "ttft_ratio_p50": _ratio(at(over.ttft, 0.5), at(one.ttft, 0.5)),
        "ttft_ratio_p99": _ratio(at(over.ttft, 0.99), at(one.ttft, 0.99)),
        "goodput_ratio": _ratio(over.per_s, capacity.per_s),
        "refused_share": round(len(over.refused) / max(over.offered, 1), 3),
        "refusal_ms_p50": 1e3 * at(over.refused, 0.5) or None,
        "refusals_without_delay": float(sum(delay <= 0 for delay in over.delays)),
        "rss_growth": _ratio(rest[-1], rest[0]) if rest else None,
    }


def _ratio(one: float, other: float) -> float | None:
    return round(one / other, 3) if one and other else None


def table(phases: dict[str, Phase]) -> str:
    """Return one line per load."""
    header = ["load", "offered/s", "finished/s", "refused", "of them late", "failed", "TTFT p50", "TTFT p99", "RSS"]
    rows = [
        [
            name,
            f"{phase.offered / phase.lasted_s:.1f}",
            f"{phase.per_s:.1f}",
            f"{len(phase.refused) / phase.offered:.1%}",
            f"{phase.late}",
            f"{len(phase.failed)}",
            f"{1e3 * at(phase.ttft, 0.5):.0f} ms",
            f"{1e3 * at(phase.ttft, 0.99):.0f} ms",
            f"{min(phase.rss) / 2**20:.1f} to {max(phase.rss) / 2**20:.1f} MiB" if phase.rss else "-",
        ]
        for name, phase in phases.items()
    ]
    return markdown(header, rows)


def cpu_s(state: ClusterState) -> dict[str, float]:
    """Return the processor seconds of each process so far."""
    times = {name: psutil.Process(one.pid).cpu_times() for name, one in state.processes.items()}
    return {name: used.user + used.system for name, used in times.items()} | {"client": time.process_time()}


def burst(count: int) -> None:
    """Send `count` HTTP requests at the same time to a fresh cluster with default limits, twice, and print the ends."""
    found = dict[str, bursts.Burst]()
    with cluster(NAME) as state:
        for model in ("oracle", ""):
            name = "with `model`" if model else "without `model`"
            before = cpu_s(state)
            found[name] = asyncio.run(bursts.burst(str(state.http), count, model))
            used = {process: round(after - before[process], 1) for process, after in cpu_s(state).items()}
            print(name, dict(found[name].ends), f"CPU seconds: {used}", file=sys.stderr)
    print(bursts.table(found))


def main(argv: list[str]) -> None:
    """Measure, print, and fill the section of the page if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter phases: under 2 minutes")
    parser.add_argument("--seconds", type=float, help="of each phase")
    parser.add_argument("--load", type=float, default=5.0, help="times the capacity")
    parser.add_argument("--max-wait", type=float, default=0.3, help="router.queue.max_wait_s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/measurements/")
    parser.add_argument("--burst", type=int, help="only this many HTTP requests at the same time")
    args = parser.parse_args(argv)
    if args.burst:
        return burst(args.burst)
    load = os.getloadavg()[0]
    with cluster(NAME, *SETS, f"router.queue.max_wait_s={args.max_wait}") as state:
        phases = asyncio.run(measure(state, args))
    for error in [error for phase in phases.values() for error in phase.failed][:5]:
        print(error, file=sys.stderr)
    figures = ratios(phases)
    print(table(phases))
    if args.write_docs:
        page = ROOT / "docs" / "measurements" / "overload.md"
        facts = [
            f"- command: python benchmarks/overload.py {shlex.join(argv)}",
            f"- other load at the start: {load:.1f}",
        ]
        facts += [f"- {name}: {value}" for name, value in machine().items()]
        content = "\n".join(
            [*facts, "", table(phases), "", markdown(["figure", "value"], [[k, str(v)] for k, v in figures.items()])]
        )
        page.write_text(fill(page.read_text(), content, NAME))
    print(json.dumps({"benchmark": NAME, "ratios": figures}))


if __name__ == "__main__":
    main(sys.argv[1:])
