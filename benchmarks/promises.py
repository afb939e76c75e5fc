"""Promises of latency: kept share, refusals, and goodput against an oracle's, at 0.5 to 2 times the capacity.

    python benchmarks/promises.py --simulated      only the simulator: deterministic, about 8 minutes
    python benchmarks/promises.py --quick          and a real cluster with shorter loads: about 10 more minutes
    python benchmarks/promises.py --write-docs     and the figures and pictures in docs/measurements

The simulated cluster has one prefill and one decode worker with noisy steps, and production's admission code. The real
one has the same roles and a model with random weights; its profile (`baton profile --live`) drives the oracle. Each
finds its capacity first: requests per second while enough wait. Then requests arrive in an open loop (Poisson), all
with the same limits. `kept` is the share of accepted requests that kept both, with its 95 % interval (Wilson). The
oracle accepts a request exactly if the simulated future of all accepted requests keeps every limit. That of the real
cluster has the mean times of the profile. The control serves all requests in order, without promises. The last line of
stdout is one JSON object with the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/promises.py`

from baton import AsyncClient
from baton.errors import BatonError, PromiseRefused
from baton.planner.profile import load_profile
from baton.planner.search import Shape, Site
from baton.planner.sim.scenario import Linear, Network, Pool, Router, Scenario, Slo, line
from benchmarks.lib.cluster import cluster
from benchmarks.lib.disagg_run import SETS, SPLIT, Side, default_cache
from benchmarks.lib.machine import machine
from benchmarks.lib.models import make_model
from benchmarks.lib.promises_oracle import Result, capacity, control, oracle, poisson, promised, without_noise
from benchmarks.lib.protocol import ROOT, python_path
from benchmarks.lib.report import fill, markdown

if TYPE_CHECKING:
    from baton.cluster.state_dir import ClusterState

NAME = "promises"
LOADS = (0.5, 0.75, 1.0, 1.5, 2.0)  # times the capacity
LENGTHS = [(64, 24), (128, 48), (256, 32), (512, 64)]  # prompt and answer tokens
NOISE = (0.9, 0.95, 1.0, 1.0, 1.05, 1.1)  # equally likely factors of simulated step times
SEED = 7
ROUTER = Router(max_requests=10**6, max_wait_s=1e3, report_s=0.1, local_prefill=False)
SIMULATED = Scenario(
    decode=Pool(1, Linear(line(0.004, 1e-4), line(0.008, 8e-4, 1e-7)), 4000, prefix_cache=False, spread=NOISE),
    prefill=Pool(1, Linear(line(0.004, 1e-4)), prefix_cache=False, spread=NOISE),
    network=Network(token_bytes=1000.0),
    router=ROUTER,
    slo=Slo(0.6, 0.05),
)


@dataclass
class Load:
    """One load on the real cluster. Times in seconds."""

    refused: list[float] = field(default_factory=list)  # time until each refusal
    answered: list[tuple[float, float]] = field(default_factory=list)  # TTFT and mean gap as the client measured
    failed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """Figures of one load."""

    load: float
    ours: Result
    oracle: Result
    control: Result
    refusals: tuple[float, ...] = ()

    @property
    def kept(self) -> float:
        return self.ours.kept / self.ours.accepted if self.ours.accepted else 1.0

    @property
    def against_oracle(self) -> float:
        return self.ours.goodput / self.oracle.goodput if self.oracle.kept else 1.0


def wilson(kept: int, of: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson, JASA 1927)."""
    if not of:
        return 0.0, 1.0
    z, share = 1.96, kept / of
    middle, half = share + z * z / (2 * of), z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return (middle - half) / (1 + z * z / of), min((middle + half) / (1 + z * z / of), 1.0)


def simulate_all(requests: int) -> list[Row]:
    """Run all loads in the simulator."""
    rate = capacity(SIMULATED, poisson(300, 1.0, LENGTHS, SEED))
    rows = []
    for load in LOADS:
        arrivals = poisson(requests, load * rate, LENGTHS, SEED + 1)
        rows.append(Row(load, promised(SIMULATED, arrivals, 0.4 * rate), oracle(SIMULATED, arrivals),
                        control(SIMULATED, arrivals)))  # fmt: skip
        print(f"simulated, {load:g} times {rate:.1f} requests/s", file=sys.stderr)
    return rows


async def ask(client: AsyncClient, load: Load, lengths: tuple[int, int], rng: random.Random, **limits: float) -> None:
    """Send one request and record its result."""
    prompt, began, times = [rng.randrange(3, 250) for _ in range(lengths[0])], time.monotonic(), list[float]()
    try:
        async with client.stream(prompt, max_tokens=lengths[1], ignore_eos=True, **limits) as stream:  # type: ignore[arg-type]
            async for _ in stream:
                times.append(time.monotonic() - began)
    except PromiseRefused:
        load.refused.append(time.monotonic() - began)
    except BatonError as error:
        load.failed.append(repr(error))
    else:
        gap_s = (times[-1] - times[0]) / max(lengths[1] - 1, 1)
        load.answered.append((times[0], gap_s))


async def opened(client: AsyncClient, rate: float, seconds: float, seed: int, **limits: float) -> Load:
    """Send requests at random times, whether earlier ones have ended or not."""
    load, rng, tasks, began = Load(), random.Random(seed), list[asyncio.Task[None]](), time.monotonic()
    for one in poisson(max(int(rate * seconds), 1), rate, LENGTHS, seed):
        await asyncio.sleep(max(began + one.at_s - time.monotonic(), 0))
        tasks.append(asyncio.create_task(ask(client, load, (one.prompt_tokens, one.max_tokens), rng, **limits)))
    await asyncio.gather(*tasks)
    return load


async def closed(client: AsyncClient, clients: int, seconds: float, rng: random.Random) -> tuple[float, Load]:
    """Keep `clients` requests in flight. Return the requests per second, and what they measured."""
    load, began = Load(), time.monotonic()

    async def one() -> None:
        while time.monotonic() - began < seconds:
            await ask(client, load, rng.choice(LENGTHS), rng)

    await asyncio.gather(*(one() for _ in range(clients)))
    return len(load.answered) / (time.monotonic() - began), load


async def measure(state: ClusterState, profile: Path, args: argparse.Namespace) -> list[Row]:
    """Run all loads on the real cluster. The limits are those that half of its capacity's load keeps, times 1.5."""
    rng, rows, seconds = random.Random(SEED), list[Row](), args.seconds or (30.0 if args.quick else 120.0)
    async with AsyncClient(state.grpc, admin=state.admin, timeout=300.0, max_retries=0) as client:
        rate, _ = await closed(client, 16, seconds, rng)
        calm = await opened(client, 0.6 * rate, max(300 / rate, seconds), SEED)
        ttft_s, gap_s = (sorted(column)[int(0.95 * len(column))] * 1.5 for column in zip(*calm.answered, strict=True))
        slo = Slo(ttft_s, gap_s)
        site = Site(load_profile(str(profile)), slo, Pool(0), Pool(0), ROUTER, seed=SEED)
        for load in LOADS:
            print(f"{load:g} times {rate:.2f} requests/s, limits {ttft_s:.3f} s and {gap_s:.4f} s", file=sys.stderr)
            before = await client.cluster()
            found = await opened(client, load * rate, seconds, SEED + 1, ttft_ms=1e3 * ttft_s, itl_ms=1e3 * gap_s)
            after = await client.cluster()
            plain = await opened(client, load * rate, seconds, SEED + 1)
            kept = after.promises_kept - before.promises_kept
            broken = after.promises_broken - before.promises_broken
            count = len(found.answered) + len(found.refused) + len(found.failed)
            good = sum(ttft <= ttft_s and gap <= gap_s for ttft, gap in plain.answered)
            arrivals = poisson(max(int(load * rate * seconds), 1), load * rate, LENGTHS, SEED + 1)
            ours = Result(count, kept + broken, kept, arrivals[-1].at_s)
            best = oracle(without_noise(site.scenario(Shape(1, 1))), arrivals)
            rows.append(Row(load, ours, best, replace(ours, accepted=count, kept=good), tuple(found.refused)))
            for error in found.failed[:3]:
                print(error, file=sys.stderr)
    return rows


def real(args: argparse.Namespace) -> list[Row]:
    """Start a cluster, measure its profile, and run all loads on it."""
    model = make_model(default_cache(), "S", "bf16")
    sets = (f"model.path={model}", *SETS, *Side(SPLIT).sets, "prefill.prefix_cache=false", "decode.prefix_cache=false")
    with tempfile.TemporaryDirectory() as folder, cluster(NAME, *sets, "router.local_prefill=never") as state:
        profile = Path(folder, "profile.json")
        argv = [sys.executable, "-m", "baton", "profile", "--live", str(profile), "--seconds", "60"]
        argv += ["--target", state.grpc, "--admin", state.admin, "--tensor-parallel", "1"]
        env = {**os.environ, "PYTHONPATH": python_path(ROOT)}
        subprocess.run(argv, env=env, cwd=ROOT, check=True, stdout=sys.stderr)
        return asyncio.run(measure(state, profile, args))


def at(values: tuple[float, ...], share: float) -> float:
    """Return a quantile, or 0 without values."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else 0.0


def table(rows: list[Row]) -> str:
    """Return one line per load."""
    header = ["load", "accepted", "kept", "95 % interval", "goodput/s", "oracle/s", "ratio", "control/s",
              "refusal p50", "refusal p99"]  # fmt: skip
    lines = []
    for row in rows:
        low, high = wilson(row.ours.kept, row.ours.accepted)
        times = [f"{1e3 * at(row.refusals, share):.1f} ms" if row.refusals else "-" for share in (0.5, 0.99)]
        goods = [f"{one.goodput:.2f}" for one in (row.ours, row.oracle)]
        lines.append([f"{row.load:g}", f"{row.ours.accepted}/{row.ours.offered}", f"{row.kept:.2%}",
                      f"{low:.1%} to {high:.1%}", *goods, f"{row.against_oracle:.3f}",
                      f"{row.control.goodput:.2f}", *times])  # fmt: skip
    return markdown(header, lines)


def figures(rows: list[Row]) -> dict[str, float | None]:
    """Return the worst of all loads."""
    refusals = tuple(one for row in rows for one in row.refusals)
    return {
        "kept_min": round(min(row.kept for row in rows), 4),
        "goodput_vs_oracle_min": round(min(row.against_oracle for row in rows), 3),
        "refusal_p99_ms": round(1e3 * at(refusals, 0.99), 2) if refusals else None,
    }


def plot(rows: list[Row], path: Path) -> None:
    """Draw calibration and goodput of the simulated loads."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, name in enumerate(("TTFT", "mean gap")):
        counts = [sum(row.ours.bins[place][tenth] for row in rows) for tenth in range(10)]
        shares = [sum(counts[: tenth + 1]) / max(sum(counts), 1) for tenth in range(10)]
        left.plot([0.0, *((tenth + 1) / 10 for tenth in range(10))], [0.0, *shares], marker="o", label=name)
    left.plot([0, 1], [0, 1], color="0.6", linestyle=":")
    left.set_xlabel("predicted quantile")
    left.set_ylabel("share of outcomes up to it")
    left.legend()
    loads = [row.load for row in rows]
    for name, series in (("promises", [r.ours for r in rows]), ("oracle", [r.oracle for r in rows]),
                         ("no promises", [r.control for r in rows])):  # fmt: skip
        right.plot(loads, [one.goodput for one in series], marker="o", label=name)
    right.set_xlabel("load, times the capacity")
    right.set_ylabel("requests/s within the limits")
    right.set_ylim(bottom=0)
    right.legend()
    figure.savefig(path, metadata={"Date": None})


def main(argv: list[str]) -> None:
    """Measure, print, and fill the section of the page if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", action="store_true", help="only the simulator")
    parser.add_argument("--quick", action="store_true", help="shorter loads")
    parser.add_argument("--seconds", type=float, help="of each real load")
    parser.add_argument("--requests", type=int, default=200, help="of each simulated load")
    parser.add_argument("--write-docs", action="store_true", help="put tables and picture into docs/measurements/")
    args = parser.parse_args(argv)
    other = os.getloadavg()[0]
    parts = {"simulated": simulate_all(args.requests)}
    if not args.simulated:
        parts["real"] = real(args)
    for name, rows in parts.items():
        print(f"{name}\n{table(rows)}")
    if args.write_docs:
        page = ROOT / "docs" / "measurements" / f"{NAME}.md"
        plot(parts["simulated"], page.with_suffix(".svg"))
        for name, rows in parts.items():
            facts = [f"- command: python benchmarks/promises.py {shlex.join(argv)}",
                     f"- other load at the start: {other:.1f}"]  # fmt: skip
            facts += [f"- {key}: {value}" for key, value in machine().items()]
            page.write_text(fill(page.read_text(), "\n".join([*facts, "", table(rows)]), f"{NAME}-{name}"))
    ratios = figures(parts.get("real", parts["simulated"]))
    extra = {f"simulated_{key}": value for key, value in figures(parts["simulated"]).items() if value is not None}
    print(json.dumps({"benchmark": NAME, "ratios": ratios | extra}))


if __name__ == "__main__":
    main(sys.argv[1:])
