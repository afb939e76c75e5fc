"""Whether a decode worker should compute short prompts itself: `router.local_prefill`, never against auto.

    python benchmarks/local_prefill.py --quick         about a minute on 2 cores
    python benchmarks/local_prefill.py                 more rounds: about 3 minutes
    python benchmarks/local_prefill.py --write-docs    the section in docs/performance.md from it

Two clusters of plain processes, alike but for that setting, one prefill and one decode worker each, on the demo model.
They take turns, in a random order each round; the other one is idle meanwhile. While a few long streams run, requests
come with 8 to 512 tokens that are not cached: whole prompts (*new*), and what follows the answer to an earlier prompt
of 256 tokens (*turn*), one at a time and in bursts of several at once. Figures are medians over the rounds of what a
round had: of TTFT the median, of the gaps between tokens of the long streams the 95th percentile.
The machine is noisy, so what counts is the ratio of the two modes within a round: its median over the rounds, and the
interval that holds the true one with 95 % (of the sign test: it takes nothing for granted but that rounds are
independent, and needs six of them). A case is slower beyond the noise when all of its interval is above 1.05, which is
said at the end.
The last line of stdout is one JSON object with the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/local_prefill.py`

from baton.cluster.state_dir import ClusterState
from baton.rpc.channel import PUBLIC, aio_channel
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1.inference_pb2_grpc import InferenceStub
from benchmarks.lib.cluster import cluster
from benchmarks.lib.machine import machine
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.report import fill, markdown

NAME = "local-prefill"
MODES = ("never", "auto")
SIZES = (8, 32, 128, 512)  # tokens to compute
EARLIER, ANSWER = 256, 8  # tokens
STREAMS, BURST = 4, 6
SLOWER = 1.05  # times as long: what is not worth a word
VOCAB = 2048
SETS = (
    "model.path=models/demo",
    "decode.kv_memory=256MiB",
    "prefill.kv_memory=256MiB",
    *(f"router.{listener}=127.0.0.1:0" for listener in ("grpc", "admin", "metrics", "http")),
)


class Case(NamedTuple):
    """`new` tokens to compute, with an earlier turn cached or not, so many requests at once."""

    turn: bool
    new: int
    at_once: int

    def __str__(self) -> str:
        how = "one" if self.at_once == 1 else f"{self.at_once} at once"
        return f"{'turn' if self.turn else 'new'}, {self.new} tokens, {how}"


@dataclass(frozen=True, slots=True)
class Sample:
    """Of one request: seconds to its first token, from there to the second one, and who computed the prompt."""

    ttft_s: float
    second_s: float
    alone: bool


@dataclass(slots=True)
class Round:
    """Of one mode: samples by case, and the gaps of the long streams meanwhile, in seconds."""

    samples: dict[Case, list[Sample]]
    gaps: dict[Case, list[float]]


def cases(at_once: Sequence[int] = (1, BURST)) -> list[Case]:
    """In the order of the table."""
    return [Case(turn, new, count) for count in at_once for turn in (False, True) for new in SIZES]


class Client:
    """Requests to one cluster. `rng` draws prompts that nobody has asked before."""

    def __init__(self, stub: Any, rng: random.Random) -> None:
        self._stub, self._rng = stub, rng

    def draw(self, tokens: int) -> list[int]:
        return [self._rng.randrange(1, VOCAB) for _ in range(tokens)]

    async def ask(self, ids: Sequence[int], tokens: int) -> tuple[Sample, list[int]]:
        """One request, and the tokens of its answer."""
        began, times, answer, alone = time.perf_counter(), list[float](), list[int](), False
        async for event in self._stub.Generate(_request(ids, tokens)):
            times += [time.perf_counter()] * len(event.tokens.ids)
            answer += event.tokens.ids
            placement = event.completed.placement
            alone = alone or (event.HasField("completed") and placement.prefill_worker == placement.decode_worker)
        return Sample(times[0] - began, times[1] - times[0], alone), answer

    async def prompt(self, case: Case) -> list[int]:
        """One for `case`; of a turn, what comes before it is answered first."""
        if not case.turn:
            return self.draw(case.new)
        earlier = self.draw(EARLIER)
        _, answer = await self.ask(earlier, ANSWER)
        return earlier + answer + self.draw(case.new)

    async def measure(self, case: Case) -> list[Sample]:
        prompts = [await self.prompt(case) for _ in range(case.at_once)]
        return [sample for sample, _ in await asyncio.gather(*(self.ask(ids, 4) for ids in prompts))]

    async def stream(self, gaps: list[tuple[float, float]]) -> None:
        """Long answers, one after the other, until cancelled: when each token came, and how long after the last."""
        while True:
            last = None
            async for event in self._stub.Generate(_request(self.draw(32), 1024)):
                now = time.perf_counter()
                if last is not None and event.tokens.ids:
                    gaps.append((now, (now - last) / len(event.tokens.ids)))
                last = now if event.tokens.ids else last


def _request(ids: Sequence[int], tokens: int) -> pb.GenerateRequest:
    sampling = common_pb2.Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True, seed=1)
    return pb.GenerateRequest(token_ids=common_pb2.TokenIds(ids=ids), sampling=sampling)


@contextlib.asynccontextmanager
async def streaming(client: Client, gaps: list[tuple[float, float]]) -> AsyncIterator[None]:
    """Long streams run, and all have begun."""
    tasks = [asyncio.create_task(client.stream(gaps)) for _ in range(STREAMS)]
    while len(gaps) < 16 * STREAMS:  # noqa: ASYNC110  (nothing to wait for: they run in this loop)
        await asyncio.sleep(0.05)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def one_round(state: ClusterState, seed: int, repeats: int) -> Round:
    """All cases, in a random order."""
    found = Round(defaultdict(list), defaultdict(list))
    rng = random.Random(seed)
    gaps: list[tuple[float, float]] = []
    async with aio_channel(state.grpc, link=PUBLIC) as channel:
        client = Client(InferenceStub(channel), rng)
        async with streaming(client, gaps):
            for case in rng.sample([case for case in cases() for _ in range(repeats)], repeats * len(cases())):
                began = time.perf_counter()
                found.samples[case] += await client.measure(case)
                found.gaps[case] += [gap for at, gap in gaps if at >= began]
    return found


@contextlib.contextmanager
def clusters() -> Iterator[dict[str, ClusterState]]:
    """One for each mode."""
    with contextlib.ExitStack() as stack:
        yield {
            mode: stack.enter_context(cluster(f"{NAME}-{mode}", *SETS, f"router.local_prefill={mode}"))
            for mode in MODES
        }


def measure(rounds: int, repeats: int) -> dict[str, list[Round]]:
    """By mode. What the first round had is thrown away: costs are learned in it."""
    found: dict[str, list[Round]] = {mode: [] for mode in MODES}
    order = random.Random(0)
    with clusters() as states:
        for number in range(rounds + 1):
            for mode in order.sample(MODES, len(MODES)):
                found[mode].append(asyncio.run(one_round(states[mode], seed=number, repeats=repeats)))
                print(f"round {number} of {rounds}: {mode}", file=sys.stderr, flush=True)
    return {mode: kept[1:] for mode, kept in found.items()}


def row(case: Case, rounds: Sequence[Round]) -> dict[str, float]:
    """Milliseconds, and the share of prompts that were computed at the decode worker."""
    samples = [one.samples[case] for one in rounds]
    return {
        "ttft_p50_ms": median(median(sample.ttft_s for sample in part) for part in samples) * 1e3,
        "second_p50_ms": median(median(sample.second_s for sample in part) for part in samples) * 1e3,
        "itl_p95_ms": median(quantiles(one.gaps[case], n=20)[18] for one in rounds if len(one.gaps[case]) > 1) * 1e3,
        "alone": sum(sample.alone for part in samples for sample in part) / sum(map(len, samples)),
    }


def ratio(case: Case, found: dict[str, list[Round]]) -> dict[str, float]:
    """How much longer the first token takes with `auto`, compared within rounds: the median, and its interval."""
    never, auto = ([median(sample.ttft_s for sample in one.samples[case]) for one in found[mode]] for mode in MODES)
    ratios = sorted(right / left for left, right in zip(never, auto, strict=True))
    outside = sign_interval(len(ratios))
    return {"ratio": median(ratios), "ratio_low": ratios[outside], "ratio_high": ratios[-1 - outside]}


def sign_interval(count: int, risk: float = 0.05) -> int:
    """How many of so many sorted values to leave out at each end: between the others lies the true median, but for
    this risk. 0 too where there are too few to say so.
    """
    tail, outside = 0.5**count, 0
    while tail + math.comb(count, outside + 1) * 0.5**count <= risk / 2:
        outside += 1
        tail += math.comb(count, outside) * 0.5**count
    return outside


def slower(figures: dict[str, dict[str, float]]) -> list[str]:
    """The cases that are slower with `auto`, and not for noise."""
    return [case for case, value in figures.items() if value["ratio_low"] > SLOWER]


def table(found: dict[str, list[Round]]) -> tuple[str, dict[str, dict[str, float]]]:
    """For people, and for programs."""
    rows, figures = [], {}
    for case in cases():
        never, auto = (row(case, found[mode]) for mode in MODES)
        both = ("never", never), ("auto", auto)
        figures[str(case)] = {f"{name}_{mode}": round(value[name], 3) for mode, value in both for name in value}
        compared = ratio(case, found)
        figures[str(case)] |= {name: round(value, 3) for name, value in compared.items()}
        pairs = [f"{never[name]:.1f} / {auto[name]:.1f}" for name in ("ttft_p50_ms", "second_p50_ms", "itl_p95_ms")]
        pairs.insert(1, "{ratio:.2f} ({ratio_low:.2f} to {ratio_high:.2f})".format(**compared))
        rows.append([str(case), *pairs, f"{auto['alone']:.0%}"])
    header = ["never / auto, ms", "TTFT p50", "ratio", "first to second token p50", "ITL p95 of the long streams"]
    return markdown([*header, "computed at the decode worker (auto)"], rows), figures


def main(argv: list[str]) -> None:
    """Measure, print, and fill the section of the page if that is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: about a minute")
    parser.add_argument("--rounds", type=int, help="of both modes, after one that is thrown away")
    parser.add_argument("--repeats", type=int, default=2, help="of each case in a round")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/performance.md")
    args = parser.parse_args(argv)
    loads = [os.getloadavg()[0]]
    found = measure(args.rounds or (6 if args.quick else 20), args.repeats)
    shown, figures = table(found)
    shown += f"\n\nslower with `auto` beyond the noise: {', '.join(slower(figures)) or 'none'}"
    print(shown)
    if args.write_docs:
        page, date = ROOT / "docs" / "performance.md", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        facts = [f"- date: {date}", f"- command: python benchmarks/local_prefill.py {shlex.join(argv)}"]
        facts += [f"- load before: {loads[0]:.1f}"]
        facts += [f"- {name}: {value}" for name, value in machine().items()]
        page.write_text(fill(page.read_text(), "\n".join([*facts, "", shown]), NAME))
    print(json.dumps({"benchmark": NAME, "figures": figures}))


if __name__ == "__main__":
    main(sys.argv[1:])
