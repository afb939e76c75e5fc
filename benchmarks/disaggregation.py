"""One prefill and one decode worker against two that do both, on the same load.

    python benchmarks/disaggregation.py --quick         under 10 minutes on 2 cores
    python benchmarks/disaggregation.py                 more rates and rounds: about 40 minutes
    python benchmarks/disaggregation.py --write-docs    the section in docs/performance.md from it

Both sides are two workers of one thread each, the same model (125 M parameters, random weights, bf16), the same code
but for `mode`, the same arrivals: streams of short prompts, and long prompts among them (lib/mixed_load.py), Poisson,
sent by a process of its own whose CPU share is told. Chunked prefill has a best chunk size for a load; it is looked for
first (`--chunks`), by the requests/s within the tight SLO. Then both sides take turns, in a random order, at each rate.

*Goodput* is the most requests/s, over all rates, whose first token and whose own 99th percentile of the gaps between
tokens keep to the SLO. The SLO is a multiple of what one request alone takes on the split side: the first token of a
long prompt in 5 times its time, gaps of `--tight` (2) times the usual one. Other multiples are shown beside it:
there are such at which splitting loses. Medians over the rounds of ratios within a round.
The last line of stdout is one JSON object with the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/disaggregation.py`

from benchmarks.lib.disagg_figures import Phase, Slo, best_goodput, seen_of
from benchmarks.lib.disagg_plot import plot
from benchmarks.lib.disagg_run import SPLIT, Side, add_options, closed, colocated, loaded, numbers, running, warm_up
from benchmarks.lib.mixed_load import DOCUMENT, STREAM
from benchmarks.lib.models import make_model
from benchmarks.lib.report import finish, markdown

if TYPE_CHECKING:
    from baton.cluster.state import ClusterState

NAME = "disaggregation"
PATIENCE = 5.0  # times what the first token of a long prompt takes alone
LOOSE = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)  # times the usual gap
ALONE = 6  # requests, one after the other
ITL_GUESS_S = 0.1  # what clusters aim at before the usual gap is known


def usual(state: ClusterState) -> Slo:
    """What one request alone takes: the first token of a long prompt, and a gap. Medians, in seconds."""
    documents, streams = (
        [seen_of(sample) for sample in closed(state, kind.prompt_tokens, kind.max_tokens, ALONE)["samples"]]
        for kind in (DOCUMENT, STREAM)
    )
    return Slo(median(one.ttft_s for one in documents), median(gap for one in streams for gap in one.gaps_s))


def slo_of(alone: Slo, itl: float) -> Slo:
    """So many times the usual gap."""
    return Slo(alone.ttft_s * PATIENCE, alone.itl_s * itl)


class Lab:
    """The clusters that are up, and all phases that were measured."""

    def __init__(self, model: Path, seconds: float) -> None:
        self.phases: list[Phase] = []
        self.model, self._seconds = model, seconds

    def alone(self) -> Slo:
        with running(Side(SPLIT), self.model, ITL_GUESS_S) as state:
            warm_up(state)
            return usual(state)

    def turns(self, sides: list[Side], rates: list[float], rounds: range, itl_s: float) -> list[Phase]:
        """Each side at each rate, in a random order each round. All clusters are up meanwhile, and idle but for one."""
        found, order = [], random.Random(rounds.start)
        with contextlib.ExitStack() as stack:
            states = {side.name: stack.enter_context(running(side, self.model, itl_s)) for side in sides}
            for state in states.values():
                warm_up(state)
            for number, rate in [(number, rate) for number in rounds for rate in order.sample(rates, len(rates))]:
                for side in order.sample(sides, len(sides)):
                    found.append(loaded(states[side.name], side, rate, self._seconds, number))
                    self._say(found[-1])
        self.phases += found
        return found

    def _say(self, phase: Phase) -> None:
        itl, ttft = phase.itl(0.99) * 1e3, phase.ttft(0.5) * 1e3
        text = f"round {phase.round}, {phase.rate:g}/s, {phase.side}: TTFT p50 {ttft:.0f} ms, ITL p99 {itl:.1f} ms"
        print(f"{text}, generator {phase.generator_cpu:.0%} of a core", file=sys.stderr, flush=True)


def best_chunk(phases: list[Phase], chunks: list[int], slo: Slo) -> int:
    """By goodput within `slo`; of equal ones, the lower tail of gaps."""

    def rank(chunk: int) -> tuple[float, float]:
        own = [phase for phase in phases if phase.side == colocated(chunk).name]
        return -best_goodput(own, slo), max(phase.itl(0.99) for phase in own)

    return min(chunks, key=rank)


def ratios(phases: list[Phase], other: str, rate: float, slo: Slo) -> dict[str, float]:
    """Above 1: splitting is better. Latencies at `rate`, goodput over all rates; medians over the rounds."""
    found: dict[str, list[float]] = {"itl_p99_ratio": [], "goodput_ratio": [], "ttft_p50_ratio": []}
    for number in sorted({phase.round for phase in phases}):
        own, theirs = (
            [phase for phase in phases if phase.round == number and phase.side == side] for side in (SPLIT, other)
        )
        (split,), (mixed,) = ([phase for phase in part if phase.rate == rate] for part in (own, theirs))
        found["itl_p99_ratio"].append(mixed.itl(0.99) / split.itl(0.99))
        found["ttft_p50_ratio"].append(mixed.ttft(0.5) / split.ttft(0.5))
        found["goodput_ratio"].append(_over(best_goodput(own, slo), best_goodput(theirs, slo)))
    return {key: median(values) for key, values in found.items()}


def _over(left: float, right: float) -> float:
    return left / right if right else math.inf


def latencies(phases: list[Phase]) -> str:
    """A row for each rate and side: medians over the rounds, and their spread."""
    rows = []
    for rate in sorted({phase.rate for phase in phases}):
        for side in sorted({phase.side for phase in phases}, reverse=True):
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


def regions(phases: list[Phase], sides: list[Side], alone: Slo) -> str:
    """Goodput of each side for each multiple of the usual gap: where splitting wins, and where it loses."""
    rows = []
    for times in LOOSE:
        slo = slo_of(alone, times)
        best = [best_goodput([phase for phase in phases if phase.side == side.name], slo) for side in sides]
        ratio = _over(best[0], max(best[1:]))
        rows.append([f"{times:g} x {alone.itl_s * 1e3:.1f} ms", *(f"{value:.2f}" for value in best), f"{ratio:.2f}"])
    header = ["ITL goal", *(side.name for side in sides), "split / best colocated"]
    return markdown(
        [f"{name}, good requests/s" if name != header[0] else name for name in header[:-1]] + header[-1:], rows
    )


def main(argv: list[str]) -> None:
    """Measure, print, and fill the section of the page if that is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rates, rounds and chunks: under 10 minutes")
    parser.add_argument("--chunks", type=numbers, help="tokens of a colocated step, to choose from")
    parser.add_argument("--plot", type=Path, help="a picture of it, .svg or .png; needs matplotlib")
    add_options(parser)
    args = parser.parse_args(argv)
    chunks = args.chunks or ([64, 256] if args.quick else [32, 64, 128, 256, 512])
    rates = args.rates or ([2.0, 4.0, 6.0] if args.quick else [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0])
    load, lab = os.getloadavg()[0], Lab(args.model or make_model(args.cache, "M", "bf16"), args.seconds)
    alone = lab.alone()
    slo, middle = slo_of(alone, args.tight), rates[len(rates) // 2]
    sweep = lab.turns([colocated(chunk) for chunk in chunks], [middle], range(1), slo.itl_s)
    chunk = best_chunk(sweep, chunks, slo)
    sides = [Side(SPLIT), colocated(chunk)]
    usual_chunk = max(chunks)
    if usual_chunk != chunk:
        sides.append(colocated(usual_chunk))
    phases = lab.turns(sides, rates, range(1, 1 + (args.rounds or (1 if args.quick else 3))), slo.itl_s)
    found = ratios(phases, colocated(chunk).name, middle, slo)
    told = (
        f"One request alone: first token of {DOCUMENT.prompt_tokens} tokens {alone.ttft_s * 1e3:.0f} ms, gap "
        f"{alone.itl_s * 1e3:.1f} ms. SLO: {slo.ttft_s * 1e3:.0f} ms and {slo.itl_s * 1e3:.1f} ms. Best chunk: {chunk} "
        f"of {', '.join(map(str, chunks))}. Latency ratios at {middle:g} requests/s."
    )
    shown = "\n\n".join((told, latencies(sweep), latencies(phases), regions(phases, sides, alone)))
    if args.plot is not None and not plot(phases, slo, args.plot):
        print("no picture: matplotlib is not installed", file=sys.stderr)
    finish(NAME, argv, load, shown, found, write_docs=args.write_docs)


if __name__ == "__main__":
    main(sys.argv[1:])
