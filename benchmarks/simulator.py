"""The simulator against the clusters that it speaks of, and how fast it is.

    python benchmarks/simulator.py --quick         about 6 minutes on 2 cores
    python benchmarks/simulator.py                 more rates and rounds: about 30 minutes
    python benchmarks/simulator.py --write-docs --phases benchmarks/results/disaggregation.json --profile FILE

On the clusters and loads of benchmarks/disaggregation.py: one prefill and one decode worker, and two colocated ones. A
profile is measured on one of each kind (`baton profile --live`), once. Then each load runs on each cluster (`--phases`:
it did, in benchmarks/disaggregation.py with `--keep`), and the same arrivals go through the simulator with the profile
of its kind: nothing is fitted to what the load gave. An error is |simulated - measured| / measured of a figure of one
load on one cluster, measured as the median over the rounds; the ratios are the medians over loads and clusters, and the
table has each. Goodput is requests/s at each rate that keep to the tightest goal of benchmarks/disaggregation.py which
both sides keep at some rate; its error under each other goal stands in a table of its own. Speed is that of
`python -m simulator`.
The last line of stdout is one JSON object with the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/simulator.py`

from baton.logs import configure_logging
from baton.workload import Arrival
from benchmarks.disaggregation import Lab, of_colocated
from benchmarks.lib.disagg_figures import Phase, Slo, kept
from benchmarks.lib.disagg_goals import AIM, GOALS, goals, sides_of, slo_of, tightest
from benchmarks.lib.disagg_run import SPLIT, Side, add_options, colocated
from benchmarks.lib.mixed_load import arrivals
from benchmarks.lib.models import make_model
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.report import finish, markdown
from simulator import simulate
from simulator.plan_shape import Shape, Site
from simulator.profile import Profile, load_profile
from simulator.scenario import Pool, Router
from simulator.scenario import Slo as SimulatedSlo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulator.report import Report

NAME = "simulator"
FIGURES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "goodput")
LIMITS = {"ttft_p50": 0.15, "itl_p50": 0.15, "ttft_p99": 0.25, "itl_p99": 0.25, "goodput": 0.10}  # what is aimed at
CHUNK = 256  # tokens of a colocated step


@dataclass(frozen=True, slots=True)
class Compared:
    """One load on one side: figures that were measured and simulated, seconds, and requests/s for goodput."""

    side: str
    rate: float
    measured: dict[str, float]
    simulated: dict[str, float]

    def error(self, figure: str) -> float:
        """As a share of what was measured."""
        theirs = self.measured[figure]
        return abs(self.simulated[figure] - theirs) / theirs if theirs else float(self.simulated[figure] > 0)


class Profiles(NamedTuple):
    """One for each kind of cluster: what two decoding workers of one host cost each other only theirs shows."""

    split: Profile
    colocated: Profile

    def of(self, side: Side) -> Profile:
        """That of such a cluster."""
        return self.split if side.chunk is None else self.colocated


def measured(phases: Sequence[Phase], slo: Slo) -> dict[str, float]:
    """Medians over the rounds of one side and rate."""
    return {
        "ttft_p50": median(phase.ttft(0.5) for phase in phases),
        "ttft_p99": median(phase.ttft(0.99) for phase in phases),
        "itl_p50": median(phase.itl(0.5) for phase in phases),
        "itl_p99": median(phase.itl(0.99) for phase in phases),
        "goodput": median(phase.goodput(slo) for phase in phases),
    }


def simulated(profile: Profile, side: Side, phases: Sequence[Phase], slo: Slo) -> dict[str, float]:
    """The same loads through the simulator: medians over the rounds."""
    reports = [(predict(profile, side, phase, slo), phase.seconds) for phase in phases]
    return {
        "ttft_p50": median(report.ttft.p50 for report, _ in reports),
        "ttft_p99": median(report.ttft.p99 for report, _ in reports),
        "itl_p50": median(report.itl.p50 for report, _ in reports),
        "itl_p99": median(report.itl.p99 for report, _ in reports),
        "goodput": median(report.good / seconds for report, seconds in reports),
    }


def predict(profile: Profile, side: Side, phase: Phase, slo: Slo) -> Report:
    """The arrivals of one phase. Where pools slow each other down, a second time, as much as they were busy."""
    found = [(at, kind) for at, kind in arrivals(phase.rate, phase.seconds, phase.round)]
    load = [Arrival(at - found[0][0], kind.prompt_tokens, kind.max_tokens) for at, kind in found]
    shape = Shape(1, 1) if side.chunk is None else Shape(2, chunk=side.chunk)
    site = Site(
        profile,
        SimulatedSlo(slo.ttft_s, slo.itl_s, slo.percentile),
        prefill=Pool(0),
        decode=Pool(0),
        router=Router(max_requests=1024, max_wait_s=120.0),
    )
    report = simulate(site.scenario(shape), load)
    if site.shares_host(shape):
        report = simulate(site.scenario(shape, report.prefill.busy, report.decode.busy), load)
    return report


def speed(requests: int, workers: int) -> dict[str, float]:
    """Of `python -m simulator`, in a process of its own."""
    argv = [sys.executable, "-m", "simulator", "--requests", str(requests), "--workers", str(workers)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, env=env, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(found: Sequence[Compared]) -> str:
    """A row for each load and side: measured / simulated, and how far off."""
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
    """Measure, print, and fill the section of the page if that is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rates and rounds")
    parser.add_argument("--requests", type=int, help="of the run that measures speed")
    parser.add_argument("--phases", type=Path, help="what benchmarks/disaggregation.py --keep wrote: compare with that")
    parser.add_argument("--profile", type=Path, help="with --phases: what the same run wrote with --profile")
    add_options(parser)
    args = parser.parse_args(argv)
    configure_logging("warning")
    load, lab = os.getloadavg()[0], Lab(args.model or make_model(args.cache, "M", "bf16"), args.seconds)
    alone, profiles = learned(lab) if args.profile is None else (None, known(args.profile))
    alone, phases = kept(args.phases) if args.phases is not None else loads(lab, alone or lab.alone(), args)
    slo = tightest(goals(phases, alone, args.percentile)).slo
    found = compared(profiles, phases, slo)
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


def compared(profiles: Profiles, phases: list[Phase], slo: Slo) -> list[Compared]:
    """Each side at each rate."""
    found = []
    for side in (side for side in sides_of(phases) if not side.startswith("vllm")):
        for rate in sorted({phase.rate for phase in phases}):
            own = [phase for phase in phases if (phase.side, phase.rate) == (side, rate)]
            theirs = simulated(profiles.of(named(side)), named(side), own, slo)
            found.append(Compared(side, rate, measured(own, slo), theirs))
    return found


def by_goal(profiles: Profiles, phases: list[Phase], alone: Slo, percentile: int) -> str:
    """How far off goodput is under other ITL goals: each decides at another place of the gaps' distribution."""
    rows = []
    for times in GOALS:
        slo = slo_of(alone, times, percentile)
        errors = [one.error("goodput") for one in compared(profiles, phases, slo) if one.measured["goodput"]]
        if errors:
            rows.append([f"{times:g} x {alone.itl_s * 1e3:.1f} ms", f"{median(errors):.1%}", str(len(errors))])
    return markdown(["ITL goal", "goodput, error", "loads with any"], rows)


def loads(lab: Lab, alone: Slo, args: argparse.Namespace) -> tuple[Slo, list[Phase]]:
    """What real clusters make of them."""
    rates = args.rates or ([2.0, 4.0] if args.quick else [1.0, 2.0, 3.0, 4.0, 5.0])
    rounds = range(1, 1 + (args.rounds or (1 if args.quick else 3)))
    return alone, lab.turns([Side(SPLIT), colocated(CHUNK)], rates, rounds, alone.itl_s * AIM)


def named(side: str) -> Side:
    """As `Side.name` says it."""
    return Side(SPLIT) if side == SPLIT else colocated(int(side.removeprefix("colocated-")))


def learned(lab: Lab) -> tuple[Slo, Profiles]:
    """What one request alone takes on the split side, and the profiles of both, measured now."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "here.json"
        alone = lab.alone(file)
        lab.profile(colocated(CHUNK), alone, of_colocated(file))
        return alone, known(file)


def known(file: Path) -> Profiles:
    """Of a file of the split side, and the one beside it."""
    return Profiles(load_profile(str(file)), load_profile(str(of_colocated(file))))


if __name__ == "__main__":
    main(sys.argv[1:])
