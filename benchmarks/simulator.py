"""Accuracy of the simulator against real clusters, and its speed.

    python benchmarks/simulator.py --quick         about 6 minutes on 2 cores
    python benchmarks/simulator.py                 more rates and rounds: about 35 minutes
    python benchmarks/simulator.py --write-docs --phases benchmarks/results/disaggregation.json --profile FILE

Clusters and loads are those of benchmarks/disaggregation.py: one prefill and one decode worker, and two colocated ones.
Each round measures a profile of each cluster (`baton profile --live`) before its loads. Each chunk size has its own
profile, because steps of 16 and 256 tokens are not on one line. Then each load runs on each cluster, or comes from an
earlier run of benchmarks/disaggregation.py with `--keep` (`--phases`). The same arrivals go through the simulator with
that round's profile, scaled by the gap of a lone request just before and after the load. Nothing is fitted to the
load's results. An error is |simulated - measured| / measured of one figure, load and cluster. Both values are medians
over the rounds, with five simulator seeds each. The ratios are medians over loads and clusters, and the table has each.
Goodput is requests/s within the goal that both sides are configured for. A second table has its error under other
goals, with the measured and simulated gain of splitting. Speed is that of `python -m baton.planner.sim`. The last line
of stdout is one JSON object with the figures.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/simulator.py`

from baton.bench.traces import Arrival
from baton.logs import configure_logging
from baton.planner.profile import Profile, load_profile
from baton.planner.search import Shape, Site
from baton.planner.sim.cluster import simulate
from baton.planner.sim.scenario import Pool, Router, Scenario, Slow
from baton.planner.sim.scenario import Slo as SimulatedSlo
from benchmarks.disaggregation import Lab, profile_file
from benchmarks.lib.disagg_figures import Phase, Slo, attainment, highest, kept
from benchmarks.lib.disagg_goals import AIM, GOALS, Goal, sides_of, slo_of
from benchmarks.lib.disagg_run import SPLIT, Side, add_options, colocated
from benchmarks.lib.mixed_load import STREAM, arrivals
from benchmarks.lib.models import make_model
from benchmarks.lib.protocol import ROOT, python_path
from benchmarks.lib.report import finish, markdown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.planner.sim.stats import Report

Profiles = dict[tuple[str, int], Profile]  # by side and round, because the speed of a machine drifts

NAME = "simulator"
FIGURES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "goodput")
LIMITS = {"ttft_p50": 0.15, "itl_p50": 0.15, "ttft_p99": 0.25, "itl_p99": 0.25, "goodput": 0.10}  # accepted errors
CHUNK = 256  # tokens of a colocated step
SEEDS = range(5)  # per simulated load, because one draw of step times is as random as one measurement
WORKERS = (("decode-0", "decode-1"), ("prefill-0", "decode-0"))  # colocated, and split
LONG_S = 1e6  # longer than any load


@dataclass(frozen=True, slots=True)
class Compared:
    """One load on one side: measured and simulated figures in seconds, or requests/s for goodput."""

    side: str
    rate: float
    measured: dict[str, float]
    simulated: dict[str, float]

    def error(self, figure: str) -> float:
        """Return the error as a share of the measured value."""
        theirs = self.measured[figure]
        return abs(self.simulated[figure] - theirs) / theirs if theirs else float(self.simulated[figure] > 0)


def measured(phases: Sequence[Phase], slo: Slo) -> dict[str, float]:
    """Return medians over the rounds of one side and rate, and the share of all requests within the SLO."""
    return {
        "ttft_p50": median(phase.ttft(0.5) for phase in phases),
        "ttft_p99": median(phase.ttft(0.99) for phase in phases),
        "itl_p50": median(phase.itl(0.5) for phase in phases),
        "itl_p99": median(phase.itl(0.99) for phase in phases),
        "goodput": median(phase.goodput(slo) for phase in phases),
        "share": attainment(phases, slo),
    }


def simulated(profiles: Profiles, phases: Sequence[Phase], slo: Slo, usual_s: float) -> dict[str, float]:
    """Return the same figures of the same loads in the simulator, with all `SEEDS`."""
    pairs = [
        (phase, predict(profiles[phase.side, phase.round], phase, slo, usual_s, seed))
        for phase in phases
        for seed in SEEDS
    ]
    reports = [report for _, report in pairs]
    return {
        "ttft_p50": median(report.ttft.p50 for report in reports),
        "ttft_p99": median(report.ttft.p99 for report in reports),
        "itl_p50": median(report.itl.p50 for report in reports),
        "itl_p99": median(report.itl.p99 for report in reports),
        "goodput": median(report.good / phase.seconds for phase, report in pairs),
        "share": sum(report.good for report in reports) / max(sum(report.arrivals for report in reports), 1),
    }


def predict(profile: Profile, phase: Phase, slo: Slo, usual_s: float, seed: int) -> Report:
    """Simulate a phase under `slo` at its machine speed. `usual_s`: usual lone gap. `seed`: of the step times."""
    found = [(at, kind) for at, kind in arrivals(phase.rate, phase.seconds, phase.round)]
    load = [Arrival(at - found[0][0], kind.prompt_tokens, kind.max_tokens) for at, kind in found]
    longer = phase.speed * usual_s / usual_gap(profile, phase.side)
    return simulate(scenario(profile, phase.side, slo.times(phase.speed), phase.told_s, longer, seed), load)


def usual_gap(profile: Profile, side: str) -> float:
    """Return the median gap in seconds of a lone request, as simulated with this profile."""
    alone = [Arrival(100.0 * number, STREAM.prompt_tokens, STREAM.max_tokens // 2) for number in range(8)]
    return simulate(scenario(profile, side, Slo(1.0, 1.0), math.inf), alone).itl.p50


def scenario(profile: Profile, side: str, slo: Slo, told_itl_s: float, longer: float = 1.0, seed: int = 0) -> Scenario:
    """Return a side of benchmarks/disaggregation.py, with all step times multiplied by `longer`."""
    chunk = named(side).chunk
    site = Site(
        profile,
        SimulatedSlo(slo.ttft_s, slo.itl_s, slo.percentile),
        prefill=Pool(0),
        decode=Pool(0),
        router=Router(max_requests=1024, max_wait_s=120.0, slo_itl_s=told_itl_s),
        faults=tuple(Slow(0.0, LONG_S, worker, longer) for worker in WORKERS[chunk is None]),
        seed=seed,
    )
    return site.scenario(Shape(1, 1) if chunk is None else Shape(2, chunk=chunk))


def speed(requests: int, workers: int) -> dict[str, float]:
    """Run `python -m baton.planner.sim` and return its figures."""
    argv = [sys.executable, "-m", "baton.planner.sim", "--requests", str(requests), "--workers", str(workers)]
    env = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    done = subprocess.run(argv, env=env, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(found: Sequence[Compared]) -> str:
    """Return a row per load and side: measured / simulated, and the error."""
    rows = []
    for one in found:
        cells = []
        for figure in FIGURES:
            scale, unit = (1.0, "/s") if figure == "goodput" else (1e3, " ms")
            pair = f"{one.measured[figure] * scale:.1f} / {one.simulated[figure] * scale:.1f}{unit}"
            cells.append(f"{pair} ({one.error(figure):.0%})")
        rows.append([one.side, f"{one.rate:g}", *cells])
    return markdown(["side", "requests/s", *(figure.replace("_", " ") for figure in FIGURES)], rows)


def main(argv: list[str]) -> None:
    """Measure, print, and fill the section of the page if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rates and rounds")
    parser.add_argument("--requests", type=int, help="of the run that measures speed")
    parser.add_argument("--phases", type=Path, help="what benchmarks/disaggregation.py --keep wrote: compare with that")
    parser.add_argument("--profile", type=Path, help="with --phases: what the same run wrote with --profile")
    add_options(parser)
    args = parser.parse_args(argv)
    configure_logging("warning")
    load = os.getloadavg()[0]
    alone, phases, profiles = before(args) if args.phases is not None else loads(args)
    slo = slo_of(alone, AIM, args.percentile)
    found = compared(profiles, phases, slo, alone.itl_s)
    fast = speed(args.requests or (20_000 if args.quick else 1_000_000), 1000)
    ratios = {f"{figure}_error": round(median(one.error(figure) for one in found), 4) for figure in FIGURES}
    ratios["events_per_s"] = fast["events_per_s"]
    told = (
        f"SLO: {slo.ttft_s * 1e3:.0f} ms and {slo.itl_s * 1e3:.1f} ms. Measured / simulated (error). Aimed at: "
        + ", ".join(f"{figure} {limit:.0%}" for figure, limit in LIMITS.items())
        + f".\n\n{fast['requests']:,.0f} requests over {fast['workers']:,.0f} workers: {fast['cpu_s']:.0f} s of CPU, "
        f"{fast['us_per_request']:.0f} us a request, {fast['events_per_s']:,.0f} events/s, {fast['peak_mib']:,.0f} MiB."
    )
    others = by_goal(profiles, phases, alone, args.percentile)
    finish(NAME, argv, load, f"{table(found)}\n\n{others}\n\n{told}", ratios, write_docs=args.write_docs)


def compared(profiles: Profiles, phases: list[Phase], slo: Slo, usual_s: float) -> list[Compared]:
    """Compare each side at each rate."""
    found = []
    for side in (side for side in sides_of(phases) if not side.startswith("vllm")):
        for rate in sorted({phase.rate for phase in phases}):
            own = [phase for phase in phases if (phase.side, phase.rate) == (side, rate)]
            found.append(Compared(side, rate, measured(own, slo), simulated(profiles, own, slo, usual_s)))
    return found


def by_goal(profiles: Profiles, phases: list[Phase], alone: Slo, percentile: int | None) -> str:
    """Return goodput errors and splitting gains under other ITL goals, which test other parts of the gaps."""
    rows = []
    for times in GOALS:
        slo = slo_of(alone, times, percentile)
        found = compared(profiles, phases, slo, alone.itl_s)
        errors = [one.error("goodput") for one in found if one.measured["goodput"]]
        if errors:
            gains = [gain(found, times, slo, which).told for which in ("measured", "simulated")]
            rows.append([f"{times:g} x {alone.itl_s * 1e3:.1f} ms", f"{median(errors):.1%}", str(len(errors)), *gains])
    header = ["ITL goal", "goodput, error", "loads with any", "split / best colocated, measured", "simulated"]
    return markdown(header, rows)


def gain(found: Sequence[Compared], times: float, slo: Slo, which: str) -> Goal:
    """Return the capacity of each side under a goal. `which`: measured or simulated."""
    points: dict[str, list[tuple[float, float]]] = {}
    for one in found:
        figures = one.measured if which == "measured" else one.simulated
        points.setdefault(one.side, []).append((one.rate, figures["share"]))
    carried = {side: highest(sorted(own)) for side, own in points.items()}
    return Goal(times, slo, min(one.rate for one in found), carried.pop(SPLIT), carried, {})


def before(args: argparse.Namespace) -> tuple[Slo, list[Phase], Profiles]:
    """Load the phases and profiles that benchmarks/disaggregation.py kept."""
    alone, phases = kept(args.phases)
    return alone, phases, known(args.profile, phases)


def loads(args: argparse.Namespace) -> tuple[Slo, list[Phase], Profiles]:
    """Run the loads on real clusters and return the phases and profiles."""
    lab = Lab(args.model or make_model(args.cache, "M", "bf16"), args.seconds)
    rates = args.rates or ([2.0, 4.0] if args.quick else [1.0, 2.0, 3.0, 4.0, 5.0])
    rounds = range(1, 1 + (args.rounds or (1 if args.quick else 3)))
    alone = lab.alone()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "here.json"
        phases = lab.turns([Side(SPLIT), colocated(CHUNK)], rates, rounds, alone, file)
        return alone, phases, known(file, phases)


def named(side: str) -> Side:
    """Return the side with this `Side.name`."""
    return Side(SPLIT) if side == SPLIT else colocated(int(side.removeprefix("colocated-")))


def known(file: Path, phases: Sequence[Phase]) -> Profiles:
    """Load the profiles that `Lab.turns` wrote for these phases. Peers have none."""
    names = {(phase.side, phase.round) for phase in phases if not phase.side.startswith("vllm")}
    return {(side, number): load_profile(str(profile_file(file, number, side))) for side, number in names}


if __name__ == "__main__":
    main(sys.argv[1:])
